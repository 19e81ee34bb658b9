"""State that all compiled programs of the process share: the engine, the partitions, locks, notices."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from pygraph.engine import engine as engine  # callers say runtime.engine()
from pygraph.undoing import Undo, release, settle, undoing

log = logging.getLogger("pygraph")


class AnyPartition(Protocol):
    """The interface of :class:`pygraph.partition.partition.Partition` for lower packages."""

    @property
    def info(self) -> Any: ...

    @property
    def entries(self) -> dict[Any, Any]: ...

    def reset(self) -> None: ...


partitions: weakref.WeakSet[AnyPartition] = weakref.WeakSet()


# One recording at a time in the process. Taken without waiting: who finds it busy runs uncaptured.
class RecordLock:
    """A lock that knows which thread has acquired it. Any thread may release it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def acquire(self, blocking: bool = True) -> bool:
        if not self._lock.acquire(blocking):
            return False
        self._owner = threading.get_ident()
        return True

    def release(self) -> None:
        self._owner = None
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def is_held_here(self) -> bool:
        """Whether this thread has acquired it."""
        return self._owner == threading.get_ident()

    def forget_other_threads(self) -> None:
        """In a forked process: another thread's lock, which nobody would release, is free."""
        if not self.is_held_here():
            self.__init__()  # type: ignore[misc]

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


record_lock = RecordLock()

# PyTorch lets no other thread draw from a default generator while anything is captured. So whoever
# captures holds the locks of all other threads. Any number of threads may draw at a time.
_own = threading.local()  # `lock`: held while the thread runs a function that draws, uncaptured
_locks: weakref.WeakSet[Any] = weakref.WeakSet()  # of all threads
_locks_lock = threading.RLock()  # to add one, and during captures
_LONGEST_DRAWING = 1.0  # seconds that a capture waits for functions that draw; then it is given up
# Seconds that a thread waits for a capture, which may be waiting for it. Then PyTorch may raise.
LONGEST_CAPTURE = 10.0


# Releases of PyTorch with which the GPU suite has passed. The others have passed what needs no GPU.
_SEEN_ON_A_GPU = ("2.11",)


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
    release = ".".join(torch.__version__.split(".")[:2])
    if release not in _SEEN_ON_A_GPU and os.environ.get("PYGRAPH_UNTESTED_RELEASES") != "1":
        return (
            f"it has not been tested on a GPU with PyTorch {release} "
            "(PYGRAPH_UNTESTED_RELEASES=1 uses it all the same)"
        )
    return None


@functools.cache
def notice_once(text: str) -> None:
    """Logs a warning once per process."""
    log.warning(text)


def all_partitions() -> list[AnyPartition]:
    """The partitions that are alive. Thread-safe."""
    return members(partitions)


def members(of: weakref.WeakSet[AnyPartition]) -> list[AnyPartition]:
    """The live members of a set that other threads change."""
    while True:
        with contextlib.suppress(RuntimeError):  # one was added or dropped meanwhile
            return list(of)


def release_workspaces() -> None:
    """Releases the workspace of every graph; the next replay of each allocates it again. Thread-safe.
    Never raises."""
    with harmless("releasing graphs' memory"):
        for partition in all_partitions():
            for entry in list(partition.entries.values()):
                if entry.graph is not None:
                    entry.graph.release_workspace()


def note(level: int, text: str, *values: object) -> None:
    """Logs a message in the middle of a call. Ignores exceptions of the user's log handlers."""
    with contextlib.suppress(Exception):
        log.log(level, text, *values)


def first_line(error: object) -> str:
    """The first line of an error's message, or of another text; empty if there is none."""
    return (str(error).strip().splitlines() or [""])[0]


@contextlib.contextmanager
def harmless(doing: str) -> Iterator[None]:
    """Logs and drops errors of optional work in a call, such as making later calls cheaper.

    doing: names the work in the log.
    """
    try:
        yield
    except Exception as error:
        note(logging.WARNING, "%s failed: %s: %s", doing, type(error).__name__, error)


_compared = threading.local()  # `is_call`: the thread makes a call whose outputs are compared


@contextlib.contextmanager
def comparing() -> Iterator[None]:
    """Around an uncaptured call whose outputs are compared with a replay's."""
    _compared.is_call = True
    try:
        yield
    finally:
        _compared.is_call = False


def is_compared() -> bool:
    """Whether this thread makes such a call: its outputs must be complete. (The outputs of others go to
    the caller alone.)"""
    return getattr(_compared, "is_call", False)


class OthersDraw(RuntimeError):
    """Other threads have been running functions that may draw random numbers for too long to be waited
    for. A later call may be recorded."""


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """For uncaptured runs of functions that may draw random numbers. Waits while another thread
    captures.

    A thread that is part of a capture does not wait, because the capture may be waiting for it.
    """
    if _is_part_of_a_capture():
        yield
        return
    lock = drawing_lock()
    if _is_owned(lock):
        yield
        return
    undo: Undo = []
    try:
        undo.append(functools.partial(release, lock))
        lock.acquire(timeout=LONGEST_CAPTURE)
        yield
    finally:
        settle(undo)


def _is_part_of_a_capture() -> bool:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """For captures, of which there is one at a time: no other thread is in ``drawing()``.

    Raises OthersDraw where one stays there.
    """
    undo: Undo = []
    try:
        begin_capturing(undo)
        yield
    finally:
        settle(undo)


def begin_capturing(undo: Undo) -> None:
    """As ``capturing``, until the steps are made that it adds to ``undo``."""
    if _is_owned(_locks_lock):
        return  # inside of a capture of this thread
    end = time.monotonic() + _LONGEST_DRAWING
    _acquire(_locks_lock, end, undo)
    own = drawing_lock()  # never taken: what the thread itself draws is not at the same time
    for lock in list(_locks):
        if lock is not own:
            _acquire(lock, end, undo)


def _acquire(lock: Any, end: float, undo: Undo) -> None:
    undo.append(functools.partial(release, lock))
    if not lock.acquire(timeout=max(0.0, end - time.monotonic())):
        raise OthersDraw("other threads run functions that draw random numbers")


def _is_owned(lock: Any) -> bool:
    """Whether this thread has acquired it."""
    return bool(lock._is_owned())


def drawing_lock() -> Any:
    """The thread's, which it holds while it is in ``drawing()``."""
    lock = getattr(_own, "lock", None)
    if lock is None:
        lock = threading.RLock()
        undoing(functools.partial(_add_lock, lock))
        _own.lock = lock
    return lock


def _add_lock(lock: Any, undo: Undo) -> None:
    if not _is_owned(_locks_lock):
        undo.append(functools.partial(release, _locks_lock))
        _locks_lock.acquire(timeout=LONGEST_CAPTURE)
    _locks.add(lock)


_pauses = 0  # contexts of `uncaptured` that have been entered
_pauses_hold_lock = False
_POLL_SECONDS = 1e-3
_pauses_lock = threading.Lock()


def _try_to_pause(pause: Callable[[bool], None]) -> bool:
    """Counts a context; False while another thread records. (Nobody waits for that with the lock of the
    count, which the function that is being recorded may want.)"""
    global _pauses, _pauses_hold_lock
    with _pauses_lock:
        if _pauses == 0:
            # A function that is being recorded, verified or timed may be what enters the context.
            is_held_here = record_lock.is_held_here()
            if not is_held_here and not record_lock.acquire(blocking=False):
                return False
            _pauses_hold_lock = not is_held_here
            pause(True)
        _pauses += 1
        return True


@contextlib.contextmanager
def uncaptured() -> Iterator[None]:
    """While any thread is in this context, no call that begins is replayed, in any thread, and no graph
    is recorded.

    Contexts may be nested, and several threads may be in one. Entering waits until no other thread
    records. Thread-safe.
    """
    global _pauses
    try:
        pause = engine().pause
    except ImportError:  # it does not fit this PyTorch, so nothing is ever captured
        yield
        return
    while not _try_to_pause(pause):
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        with _pauses_lock:
            _pauses -= 1
            if _pauses == 0:
                pause(False)
                if _pauses_hold_lock:
                    record_lock.release()


def _forget_other_threads() -> None:
    """Replaces locks in a forked process, where other threads do not exist: a lock that one of them
    held would never be released."""
    global _locks_lock, _pauses_lock
    record_lock.forget_other_threads()
    _pauses_lock = threading.Lock()  # never held by a thread that forks
    if not _locks_lock._is_owned():  # type: ignore[attr-defined]
        _locks_lock = threading.RLock()
    own = getattr(_own, "lock", None)
    if own is not None and not own._is_owned():  # but perhaps by a thread that captured
        own = _own.lock = threading.RLock()
    _locks.clear()
    if own is not None:
        _locks.add(own)


os.register_at_fork(after_in_child=_forget_other_threads)


def reset() -> None:
    """Drops every captured graph and releases its memory.

    Compiled programs stay usable; they run uncaptured and are recorded again. Thread-safe.
    """
    for partition in all_partitions():
        partition.reset()
