"""Undoes changes, even if an interrupt (Ctrl-C) comes at any moment.

Python delivers a signal where a function begins, after each call, and at each repetition of a loop. So
it may come between a change and the ``try`` that would undo it, in the code of ``contextlib``, or in
the middle of a ``finally``. Here each undo step is noted before the change is made, and a step that was
interrupted is made again. So steps must be right if they are made twice, or if the change was not made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")

Undo = list[Callable[[], Any]]  # the last one is made first


def undoing(body: Callable[[Undo], _T]) -> _T:
    """Calls ``body`` with a list, to which it adds an undo step before each change. Afterwards, in any
    case, the steps are made. Raises their exceptions after all of them."""
    undo: Undo = []
    try:
        return body(undo)
    finally:
        try:
            settle(undo)
        except BaseException:  # an interrupt, at its beginning perhaps; and here another one
            try:
                settle(undo)
            except BaseException:
                settle(undo)
                raise
            raise


def settle(undo: Undo) -> None:
    """Makes the undo steps. Raises their exceptions after all of them."""
    try:
        while undo:
            undo[-1]()
            undo.pop()
    except BaseException:
        _finish(undo)
        raise


def _finish(undo: Undo) -> None:
    """After a step has raised: makes the same step again, and the others."""
    while undo:
        with contextlib.suppress(Exception):  # what it raised first is on its way
            undo[-1]()
        undo.pop()


def release(lock: Any) -> None:
    """An undo step: releases a lock if this thread has acquired it."""
    with contextlib.suppress(RuntimeError):
        lock.release()
