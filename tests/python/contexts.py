"""What PyGraph does for a while, as contexts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from pygraph import runtime
from pygraph.undoing import Undo, settle


@contextlib.contextmanager
def during(*begin: Callable[[Undo], Any]) -> Iterator[None]:
    """begin: functions that change something until the steps are made that they add to a list."""
    undo: Undo = []
    try:
        for one in begin:
            one(undo)
        yield
    finally:
        settle(undo)


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """This thread has the record lock."""
    undo: Undo = []
    try:
        assert runtime.record_lock.take(undo), "it is taken"
        yield
    finally:
        settle(undo)


def drawing() -> contextlib.AbstractContextManager[None]:
    """This thread runs what may draw."""
    return during(runtime.begin_drawing)


def capturing() -> contextlib.AbstractContextManager[None]:
    """This thread captures."""
    return during(runtime.begin_capturing)


def recorded(index: int) -> contextlib.AbstractContextManager[None]:
    """This thread makes one of the two recordings of a graph."""
    return during(lambda undo: runtime.begin_recording(index, undo))


def comparing() -> contextlib.AbstractContextManager[None]:
    """This thread makes a call whose outputs are compared."""
    return during(runtime.begin_comparing)
