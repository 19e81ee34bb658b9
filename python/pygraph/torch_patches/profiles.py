"""PyTorch's profiler in a process with graphs.

It attaches NVIDIA's CUPTI, which can end the process where an executable graph is launched that was
launched before (docs/explanation/profiles.md). So the engine is told when a profile begins and ends:
meanwhile each replay launches a new executable. And after a profile CUPTI is detached, which PyTorch
does if the environment variable ``TEARDOWN_CUPTI`` is 1.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.autograd import profiler

from pygraph import runtime

_DETACHES = "TEARDOWN_CUPTI"
_STAYS = "DISABLE_CUPTI_LAZY_REINIT"  # set: the profiler attaches CUPTI again at once
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
    """Whether CUPTI may be attached for one."""

    def __init__(self) -> None:
        self._engine = runtime.engine()
        self._lock = threading.Lock()
        self._attaches = False

    def begin(self, activities: Collection[Any]) -> None:
        if not activities:  # ranges of NVTX, for example
            return
        # Also for a profile of the CPU, which has the calls of CUDA.
        with self._lock:
            self._attaches = True
            self._engine.begin_profile()
        time.sleep(_MOMENT)

    def end(self) -> None:
        detaches = os.environ.get(_DETACHES) == "1" and _STAYS not in os.environ
        with self._lock:
            if not self._attaches:
                return
            self._attaches = False
            self._engine.end_profile(detaches)
        if not detaches or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        # A thread of the profiler's asks CUPTI to detach, which it does in a call of CUDA. A profile
        # that began before that would have no kernels.
        for _ in range(_CALLS):
            time.sleep(_MOMENT)
            with contextlib.suppress(RuntimeError):  # of CUDA; the call was made
                torch.cuda.is_current_stream_capturing()


def _beginning(original: Callable[..., Any], profiles: _Profiles) -> Callable[..., Any]:
    """Where PyTorch's raises an error, CUPTI may be attached by then, or by a profile under way."""

    @functools.wraps(original)
    def begin(config: Any, activities: Collection[Any], *args: Any, **kwargs: Any) -> Any:
        profiles.begin(activities)
        return original(config, activities, *args, **kwargs)

    return begin


def _ending(original: Callable[[], Any], profiles: _Profiles) -> Callable[[], Any]:
    """PyTorch's returns nothing, or a result that began at 0, where no profile has ended: for ranges
    of NVTX and ITT, and in a thread that has no profile."""

    @functools.wraps(original)
    def end() -> Any:
        result = original()
        if result is not None and result.trace_start_ns() > 0:
            profiles.end()
        return result

    return end
