"""Finds the lines of a program that train: backward, clipping, the step of an optimizer, ``zero_grad``.

While a script is observed, these functions of PyTorch note the program's line that calls them, once for
each line. Calls inside a graphed callable are not noted.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from pygraph.callables.graphed import Graphed
from pygraph.callables.host.user_code import is_library_file

BACKWARD, CLIP, STEP, ZERO = "backward", "clipping", "optimizer.step", "zero_grad"
Calls = dict[tuple[str, str, int], None]  # kind, file, line; in the order in which they came first


@contextlib.contextmanager
def noting_calls() -> Iterator[Calls]:
    """In the context, calls are noted, in any thread. Not to be nested."""
    found: Calls = {}
    places: list[tuple[Any, str, str]] = [
        (torch.Tensor, "backward", BACKWARD),
        (torch.optim.Optimizer, "zero_grad", ZERO),
        (torch.nn.utils, "clip_grad_norm_", CLIP),
        (torch.nn.utils, "clip_grad_value_", CLIP),
        # Not by a hook for all optimizers: such hooks keep steps from their graphs.
        *((optimizer, "step", STEP) for optimizer in _optimizers()),
    ]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    try:
        for (owner, name, function), (_, _, kind) in zip(kept, places, strict=True):
            setattr(owner, name, _noting(function, kind, found))
        yield found
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


def _optimizers() -> list[type]:
    """Those of ``torch.optim`` that have a step of their own."""
    classes = [value for value in vars(torch.optim).values() if isinstance(value, type)]
    return [
        class_
        for class_ in classes
        if issubclass(class_, torch.optim.Optimizer) and class_ is not torch.optim.Optimizer
        if "step" in vars(class_)
    ]


def _noting(function: Callable[..., Any], kind: str, found: Calls) -> Callable[..., Any]:
    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        _note(found, kind)
        return function(*args, **kwargs)

    return noted


def _note(found: Calls, kind: str) -> None:
    """Notes the program's line that the thread is in, if no graphed callable is around it."""
    if torch.compiler.is_compiling():
        return
    line: tuple[str, int] | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is Graphed.__call__.__code__:
            return
        if line is None and not is_library_file(frame.f_code.co_filename):
            line = frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    if line is not None:
        found[(kind, *line)] = None
