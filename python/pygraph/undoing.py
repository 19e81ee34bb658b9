"""Putting back what was changed, where an interrupt (Ctrl-C) may come at any moment.

Python delivers a signal where a function begins, after each call, and where a loop begins anew. So it
may come between a change and the ``try`` that would put it back, in the code of ``contextlib``, or in
the middle of a ``finally``. Here each step that puts something back is known before the change is made,
and a step that was interrupted is made again. Steps must be right if they are made twice, and if the
change was not made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")

Undo = list[Callable[[], Any]]  # the last one is made first


def undoing(body: Callable[[Undo], _T]) -> _T:
    """Calls ``body`` with a list, to which it adds a step before each change. Afterwards, whatever
    happens, the steps are made. Raises what they raise, after all of them."""
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
    """Makes the steps. Raises what they raise, after all of them."""
    try:
        while undo:
            undo[-1]()
            undo.pop()
    except BaseException:
        _finish(undo)
        raise


def _finish(undo: Undo) -> None:
    """After a step has raised: the same one again, and the others."""
    while undo:
        with contextlib.suppress(Exception):  # what it raised first is on its way
            undo[-1]()
        undo.pop()


def release(lock: Any) -> None:
    """A step: releases a lock that this thread has perhaps not acquired."""
    with contextlib.suppress(RuntimeError):
        lock.release()
