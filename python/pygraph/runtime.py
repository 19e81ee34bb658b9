"""What all compiled programs of the process share: the engine, the partitions, notices."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch

log = logging.getLogger("pygraph")


class AnyPartition(Protocol):
    """A :class:`pygraph.partition.partition.Partition`, for what that package is built on."""

    info: Any
    entries: dict[bytes, Any]

    def reset(self) -> None: ...


partitions: weakref.WeakSet[AnyPartition] = weakref.WeakSet()

# One recording at a time in the process. Taken without waiting: who finds it busy runs uncaptured.
record_lock = threading.Lock()

# Held during each capture, and while a function that draws from a default generator runs uncaptured:
# PyTorch lets no other thread draw from the generator while anything is captured.
_drawing_lock = threading.RLock()
_LONGEST_DRAWING = 5.0  # seconds that are waited for another thread, which may wait for this one

_SUPPORTED_TORCH = "2.11"


@functools.cache
def engine() -> Any:
    """The C++ engine. Raises ImportError where it does not fit the installed PyTorch."""
    if not torch.__version__.startswith(_SUPPORTED_TORCH + "."):
        raise ImportError(
            f"PyGraph is built for PyTorch {_SUPPORTED_TORCH}, this is {torch.__version__}"
        )
    from pygraph import _engine

    return _engine


@functools.cache
def unavailable_reason() -> str | None:
    """Why graphs cannot be used in this process, or None if they can."""
    if not torch.cuda.is_available():
        return "there is no CUDA GPU"
    if torch.cuda.get_allocator_backend() != "native":
        return "PyTorch's allocator backend is not the native one"
    try:
        engine().driver_version()
    except (ImportError, RuntimeError) as error:
        return str(error)
    return None


@functools.cache
def notice_once(text: str) -> None:
    """Says something to the user, once per process."""
    log.warning(text)


def all_partitions() -> list[AnyPartition]:
    """Those that are alive. Thread-safe."""
    return members(partitions)


def members(of: weakref.WeakSet[AnyPartition]) -> list[AnyPartition]:
    """What is alive of a set that other threads change."""
    while True:
        with contextlib.suppress(RuntimeError):  # one was added or dropped meanwhile
            return list(of)


def note(level: int, text: str, *values: object) -> None:
    """Logs something in the middle of a call, which a handler of the user's must not end."""
    with contextlib.suppress(Exception):
        log.log(level, text, *values)


@contextlib.contextmanager
def harmless(doing: str) -> Iterator[None]:
    """For what a call can do without, such as what makes later calls cheaper. Errors end here."""
    try:
        yield
    except Exception as error:
        note(logging.WARNING, "%s failed: %s: %s", doing, type(error).__name__, error)


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """For captures, and for uncaptured runs of functions that draw random numbers: one thread at a time
    is in such a context."""
    is_alone = _drawing_lock.acquire(timeout=_LONGEST_DRAWING)
    try:
        yield
    finally:
        if is_alone:
            _drawing_lock.release()


@contextlib.contextmanager
def uncaptured() -> Iterator[None]:
    """No graph of the process is replayed inside the context, in any thread; none is recorded."""
    with record_lock:
        engine().pause(True)
        try:
            yield
        finally:
            engine().pause(False)


def reset() -> None:
    """Drops every captured graph and gives its memory back.

    Compiled programs stay usable; they run uncaptured and record anew. Thread-safe.
    """
    for partition in all_partitions():
        partition.reset()
