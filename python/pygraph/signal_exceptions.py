"""Exceptions that a handler of a signal has raised while PyGraph's own code ran.

Python runs such handlers between any two instructions of the main thread. What they raise, a
``TimeoutError`` for instance, is for the program. If its class derives from ``Exception``, it looks
like an error of PyGraph's, which would be dropped.
"""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import traceback
from types import CodeType, FrameType
from typing import Any, NoReturn


def pass_on(error: Exception) -> None:
    """Raises an error, or its cause, if the handler of a signal has raised it. To be called first where
    errors of any kind are dropped."""
    raised = raised_by_handler(error)
    if raised is not None:
        raise raised


def raise_without_frames(raised: BaseException) -> NoReturn:
    """Raises what a handler has raised, without the frames where that was, which hold memory. Others
    who catch it still find that a handler has raised it."""
    raise raised.with_traceback(None)


def raised_by_handler(error: BaseException) -> BaseException | None:
    """The error, or the one that caused it or that it replaced, if a signal's handler has raised it.
    None for any other error. To be called in the function that has caught the error."""
    if threading.current_thread() is not threading.main_thread():
        return None  # handlers run there
    codes, active = _codes_of_handlers(), _active_frames()
    met: set[int] = set()
    left: set[FrameType] = set()  # frames that the errors have left
    found: BaseException | None = error
    while found is not None and id(found) not in met:
        met.add(id(found))
        frames = [frame for frame, _ in traceback.walk_tb(found.__traceback__)]
        if any(frame.f_code in codes for frame in frames):
            return found
        if any(frame not in active and _is_called_as_handler(frame) for frame in frames):
            return found
        left.update(frames[1:])
        found = found.__cause__ or _replaced(found, left)
    return None


def _replaced(error: BaseException, left: set[FrameType]) -> BaseException | None:
    """The exception that was handled in one of these frames when the error was raised. None if that was
    in another frame: one that the program was handling when it made the call is not PyGraph's."""
    before = error.__context__
    if before is None or before.__traceback__ is None:
        return None
    return before if before.__traceback__.tb_frame in left else None


def _active_frames() -> set[FrameType]:
    """Of the callers of this function's caller, which holds them: its own would be a circle."""
    return {frame for frame, _ in traceback.walk_stack(sys._getframe(2))}


def _codes_of_handlers() -> set[CodeType]:
    """Of the handlers in Python that are installed now, and of what raises again what they have raised.
    (Python's own raises KeyboardInterrupt.)"""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    functions: list[Any] = [handler for handler in handlers if callable(handler)]
    functions += [function for of in functions for function in _inside(of)]
    functions += [type(function).__call__ for function in functions]
    codes = (getattr(function, "__code__", None) for function in (*functions, raise_without_frames))
    return {code for code in codes if isinstance(code, CodeType)}


def _inside(function: Any) -> list[Any]:
    """The function of a method or a partial."""
    return [getattr(function, name) for name in ("__func__", "func") if hasattr(function, name)]


def _is_called_as_handler(frame: FrameType) -> bool:
    """Whether a number and the frame from which it was called were passed to the function of this
    frame: to a handler that is not installed any more, for instance."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    given = [frame.f_locals.get(name) for name in names] if len(names) > 1 else []
    pairs = itertools.pairwise(given)
    return any(type(a) is int and b is not None and b is frame.f_back for a, b in pairs)
