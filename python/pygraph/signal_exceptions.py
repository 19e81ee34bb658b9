"""Exceptions that a handler of a signal has raised while PyGraph's own code ran.

Python runs such handlers between any two instructions of the main thread. What they raise, a
``TimeoutError`` for instance, is for the program. If its class derives from ``Exception``, it looks
like an error of PyGraph's, which would be dropped.
"""

from __future__ import annotations

import signal
import threading
import traceback
from types import CodeType
from typing import Any


def pass_on(error: Exception) -> None:
    """Raises an error, or its cause, if the handler of a signal has raised it. To be called first where
    errors of any kind are dropped."""
    raised = raised_by_handler(error)
    if raised is not None:
        raise raised


def raised_by_handler(error: BaseException) -> BaseException | None:
    """The error, or the one that caused it (``raise ... from``), if a signal's handler has raised it.
    None for any other error: one that the program was handling before is not looked at."""
    if threading.current_thread() is not threading.main_thread():
        return None  # handlers run there
    codes = _codes_of_handlers()
    met: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in met:
        met.add(id(found))
        if any(frame.f_code in codes for frame, _ in traceback.walk_tb(found.__traceback__)):
            return found
        found = found.__cause__
    return None


def _codes_of_handlers() -> set[CodeType]:
    """Of the handlers in Python that are installed now. (Python's own raises KeyboardInterrupt.)"""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    functions: list[Any] = [handler for handler in handlers if callable(handler)]
    functions += [type(handler).__call__ for handler in functions]
    functions += [function for of in functions for function in _inside(of)]
    codes = (getattr(function, "__code__", None) for function in functions)
    return {code for code in codes if isinstance(code, CodeType)}


def _inside(function: Any) -> list[Any]:
    """The function of a method or a partial."""
    return [getattr(function, name) for name in ("__func__", "func") if hasattr(function, name)]
