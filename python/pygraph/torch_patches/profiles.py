"""PyTorch's profiler in a process with graphs.

It attaches NVIDIA's CUPTI, which can end the process where an executable graph is launched that was
launched before (docs/explanation/profiles.md). So the engine is told when a profile begins and ends:
meanwhile each replay launches a new executable. And after a profile CUPTI is detached, which PyTorch
does if the environment variable ``TEARDOWN_CUPTI`` is 1.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity

from pygraph import runtime

_DETACHES = "TEARDOWN_CUPTI"
_MOMENT = 0.002  # seconds in which a replay that has begun launches its graph
_CALLS = 10


def install() -> None:
    """Replaces the functions by which PyTorch's profiler begins and ends a profile."""
    os.environ.setdefault(_DETACHES, "1")
    profiles = _Profiles()
    replacements: dict[str, Callable[..., Any]] = {
        "_prepare_profiler": _beginning,
        "_enable_profiler": _beginning,
        "_disable_profiler": _ending,
    }
    for name, replacement in replacements.items():
        setattr(profiler, name, replacement(getattr(profiler, name), profiles))


class _Profiles:
    """Whether one of the GPU is under way."""

    def __init__(self) -> None:
        self._engine = runtime.engine()
        self._attaches = False

    def begin(self, activities: Collection[Any]) -> None:
        if ProfilerActivity.CUDA in activities:
            self._attaches = True
            self._engine.begin_profile()
            time.sleep(_MOMENT)

    def end(self) -> None:
        if not self._attaches:
            return
        self._attaches = False
        detaches = os.environ.get(_DETACHES) == "1"
        self._engine.end_profile(detaches)
        if not detaches or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        # A thread of the profiler's asks CUPTI to detach, which it does in a call of CUDA. A profile
        # that began before that would have no kernels.
        for _ in range(_CALLS):
            time.sleep(_MOMENT)
            torch.cuda.is_current_stream_capturing()


def _beginning(original: Callable[..., Any], profiles: _Profiles) -> Callable[..., Any]:
    @functools.wraps(original)
    def begin(config: Any, activities: Collection[Any], *args: Any, **kwargs: Any) -> Any:
        profiles.begin(activities)
        try:
            return original(config, activities, *args, **kwargs)
        except BaseException:  # then there is no profile
            profiles.end()
            raise

    return begin


def _ending(original: Callable[[], Any], profiles: _Profiles) -> Callable[[], Any]:
    @functools.wraps(original)
    def end() -> Any:
        try:
            return original()
        finally:
            profiles.end()

    return end
