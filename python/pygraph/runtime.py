"""State that all compiled programs of the process share: the engine, the partitions, locks, notices."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from pygraph import signal_exceptions
from pygraph.engine import engine as engine  # callers say runtime.engine()
from pygraph.engine import release as pytorch_release
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
    """Is taken by a thread, or for the contexts of ``uncaptured``. That is one step, which stores the
    owner, too: an interrupt comes before it or after it."""

    def __init__(self) -> None:
        self._owners: dict[None, int] = {}  # one at most

    def take(self, undo: Undo) -> bool:
        """False if it is taken, by whomever. Released by the step that is added to ``undo``."""
        owner = threading.get_ident()
        if self._owners.get(None) == owner:
            return False
        undo.append(functools.partial(self.release, owner))
        return self.acquire(owner)

    def acquire(self, owner: int) -> bool:
        return self._owners.setdefault(None, owner) == owner

    def release(self, owner: int) -> None:
        """Nothing happens if another one has it."""
        if self._owners.get(None) == owner:
            self._owners.clear()

    def locked(self) -> bool:
        return bool(self._owners)

    def is_held_here(self) -> bool:
        """Whether this thread has taken it."""
        return self._owners.get(None) == threading.get_ident()


record_lock = RecordLock()

# PyTorch lets no other thread draw from a default generator while anything is captured. So whoever
# captures holds the locks of all other threads. Any number of threads may draw at a time.
_own = threading.local()  # `lock`: held while the thread runs a function that draws, uncaptured
_locks: weakref.WeakSet[Any] = weakref.WeakSet()  # of all threads
_locks_lock = threading.RLock()  # to add one, and during captures
_LONGEST_DRAWING = 1.0  # seconds that a capture waits for functions that draw; then it is given up
# Seconds that a thread waits for a capture, which may be waiting for it. Then PyTorch may raise.
LONGEST_CAPTURE = 10.0


# Releases of PyTorch with which the GPU suite has passed, or the part of it for releases in between
# (docs/how-to/check-on-a-gpu.md). The others have passed what needs no GPU.
_SEEN_ON_A_GPU = ("2.11", "2.12", "2.13", "2.14", "2.15")


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
    if pytorch_release() not in _SEEN_ON_A_GPU and os.environ.get("PYGRAPH_UNTESTED_RELEASES") != "1":
        return (
            f"it has not been tested on a GPU with PyTorch {pytorch_release()} "
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
    """Logs a message in the middle of a call. Ignores exceptions of the user's log handlers, but for
    what a signal's handler has raised."""
    try:
        log.log(level, text, *values)
    except Exception as error:
        signal_exceptions.pass_on(error)


def first_line(error: object) -> str:
    """The first line of an error's message, or of another text; empty if there is none."""
    return (str(error).strip().splitlines() or [""])[0]


def brief(error: BaseException) -> str:
    """The first line of an error's message, or else the error's type."""
    return first_line(error) or type(error).__name__


@contextlib.contextmanager
def harmless(doing: str) -> Iterator[None]:
    """Logs and drops errors of optional work in a call, such as making later calls cheaper. Raises what
    a signal's handler has raised.

    doing: names the work in the log.
    """
    try:
        yield
    except Exception as error:
        signal_exceptions.pass_on(error)
        note(logging.WARNING, "%s failed: %s: %s", doing, type(error).__name__, error)


_compared = threading.local()  # `is_call`: the thread makes a call whose outputs are compared


def begin_comparing(undo: Undo) -> None:
    """Before an uncaptured call whose outputs are compared with a replay's."""
    undo.append(functools.partial(setattr, _compared, "is_call", False))
    _compared.is_call = True


def is_compared() -> bool:
    """Whether this thread makes such a call: its outputs must be complete. (The outputs of others go to
    the caller alone.)"""
    return getattr(_compared, "is_call", False)


_recorded = threading.local()  # `index`: of the recording of a pair that the thread makes


def begin_recording(index: int, undo: Undo) -> None:
    """Before one of the two recordings of a graph."""
    undo.append(functools.partial(setattr, _recorded, "index", None))
    _recorded.index = index


def is_first_recording() -> bool:
    """Whether this thread makes the recording that is only compared with the one that will run."""
    return getattr(_recorded, "index", None) == 0


class OthersDraw(RuntimeError):
    """Other threads have been running functions that may draw random numbers for too long to be waited
    for. A later call may be recorded."""


def begin_drawing(undo: Undo) -> None:
    """Before uncaptured runs of functions that may draw random numbers, until the steps are made that
    it adds to ``undo``. Waits while another thread captures.

    A thread that is part of a capture does not wait, because the capture may be waiting for it.
    """
    if _is_part_of_a_capture():
        return
    lock = drawing_lock()
    if _is_owned(lock):
        return
    undo.append(functools.partial(release, lock))
    lock.acquire(timeout=LONGEST_CAPTURE)


def _is_part_of_a_capture() -> bool:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return torch.cuda.is_current_stream_capturing()


def begin_capturing(undo: Undo) -> None:
    """Before a capture, of which there is one at a time: until the steps are made that it adds to
    ``undo``, no other thread runs what may draw.

    Raises OthersDraw where one goes on with that.
    """
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
    """The thread's, which it holds while it runs what may draw."""
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


_pauses: dict[object, int] = {}  # contexts of ``uncaptured`` that have been entered, with their threads
_FOR_PAUSES = 0  # the owner of the record lock; no thread's number
_POLL_SECONDS = 1e-3
_pauses_lock = threading.Lock()


def _begin_pause(undo: Undo, longest: float) -> None:
    """Enters a context. Waits until no other thread records, for so many seconds at most."""
    entered = object()
    undo.append(functools.partial(_end_pause, entered))
    end = time.monotonic() + longest
    while not _try_to_pause(entered) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)


def _try_to_pause(entered: object) -> bool:
    """Notes a context; False while another thread records. (Nobody waits for that with the lock of the
    contexts, which the function that is being recorded may want.)"""
    with _pauses_lock:
        if not _pauses:
            # A function that is being recorded, verified or timed may be what enters the context.
            if not record_lock.is_held_here() and not record_lock.acquire(_FOR_PAUSES):
                return False
            engine().pause(True)
        _pauses[entered] = threading.get_ident()
        return True


def _end_pause(entered: object) -> None:
    """A step. The context has perhaps not been entered."""
    with _pauses_lock:
        _pauses.pop(entered, None)
        if not _pauses:
            engine().pause(False)
            record_lock.release(_FOR_PAUSES)


@contextlib.contextmanager
def uncaptured() -> Iterator[None]:
    """While any thread is in this context, no call that begins is replayed, in any thread, and no graph
    is recorded.

    Contexts may be nested, and several threads may be in one. Entering waits until no other thread
    records. Thread-safe.
    """
    try:
        engine()
    except ImportError:  # it does not fit this PyTorch, so nothing is ever captured
        yield
        return
    undo: Undo = []
    try:
        _begin_pause(undo, math.inf)
        yield
    finally:
        settle(undo)


def begin_without_recordings(undo: Undo) -> None:
    """Until the steps are made that it adds to ``undo``, no other thread records. Waits for one that
    does, though not for ever: it may be waiting for this thread."""
    if not record_lock.is_held_here():
        _begin_pause(undo, LONGEST_CAPTURE)


def _forget_other_threads() -> None:
    """Replaces locks in a forked process, where other threads do not exist: a lock that one of them
    held would never be released."""
    global _locks_lock, _pauses_lock
    _pauses_lock = threading.Lock()  # never held by a thread that forks
    here = threading.get_ident()
    for entered in [entered for entered, thread in _pauses.items() if thread != here]:
        _end_pause(entered)
    if not record_lock.is_held_here() and not _pauses:
        record_lock.__init__()  # type: ignore[misc]
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
