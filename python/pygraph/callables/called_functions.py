"""What an observed call calls that a replay would not do, and that leaves no trace on the host: events
that it records, seeds of the GPU's generators, work for other threads.

Python tells a profile function (``sys.setprofile``) of each function that the thread calls, those of
extensions too. Only observed calls are looked at. Not seen is a function of an extension that another
one calls, as by ``map``.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import multiprocessing.queues
import os
import queue
import sys
import threading
import weakref
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils.checkpoint

from pygraph.callables.host.kinds import is_of
from pygraph.callables.host.user_code import calling_line
from pygraph.undoing import Undo

_PYTORCH = os.path.dirname(torch.__file__) + os.sep
_SETS_GENERATOR = {"manual_seed", "seed", "set_state", "set_offset", "graphsafe_set_state"}
_READS_GENERATOR = {"initial_seed", "get_state", "get_offset"}
_WAITS_FOR_EVENT = {"query", "synchronize", "elapsed_time"}
_STARTS_THREAD = {"start_new_thread", "start_new", "start_joinable_thread"}
_NAMES = _SETS_GENERATOR | _READS_GENERATOR | _WAITS_FOR_EVENT | _STARTS_THREAD
_NAMES |= {"record", "wait", "record_event", "wait_event", "put"}


def _code_of(function: Any) -> CodeType:
    found: CodeType = getattr(function, "__wrapped__", function).__code__
    return found


_HANDS_OVER = {
    _code_of(concurrent.futures.ThreadPoolExecutor.submit),
    _code_of(concurrent.futures.ProcessPoolExecutor.submit),
    _code_of(queue.Queue.put),
    _code_of(multiprocessing.queues.Queue.put),
}
_WAITS_FOR_THREAD = {_code_of(threading.Condition.wait)}
_ORDERS_STREAMS = {_code_of(torch.cuda.Stream.wait_stream)}  # by an event of its own
# These put back the state that they have read.
_KEEPS_STATE = {
    _code_of(torch.random.fork_rng),
    _code_of(torch.utils.checkpoint.get_device_states),
    _code_of(torch.utils.checkpoint.set_device_states),
}


def can_be_watched() -> bool:
    """Not while one of C's profilers has the place of the profile function."""
    return sys.getprofile() is None or callable(sys.getprofile())


@dataclasses.dataclass(eq=False)
class _Recorded:
    """event: a weak reference to it, or a list of it if its class has none. line: of the program."""

    event: Any
    line: str

    def is_event(self, event: torch.Event) -> bool:
        return (self.event[0] if type(self.event) is list else self.event()) is event

    def is_used(self) -> bool:
        """Whether others refer to the event."""
        if type(self.event) is not list:
            return self.event() is not None
        unused = [object()]
        return sys.getrefcount(self.event[0]) > sys.getrefcount(unused[0])


@dataclasses.dataclass(eq=False)
class CalledFunctions:
    """refusals: why the call can have no graph. events: those that it has recorded. is_replaced:
    whether it has taken the place of the profile function."""

    refusals: list[str] = dataclasses.field(default_factory=list)
    events: list[_Recorded] = dataclasses.field(default_factory=list)
    is_replaced: bool = False

    def refusal(self) -> str:
        """After the call. Empty if nothing was found."""
        if self.is_replaced:
            return "it sets a profile function of Python's; set it outside"
        if self.refusals:
            return self.refusals[0]
        line = self._line_of_survivor()
        if line is None:
            return ""
        return f"it records an event that outlives the call; record it outside{line}"

    def _line_of_survivor(self) -> str | None:
        """Of an event that others than this refer to. One that the call has made and dropped orders
        nothing but its own streams."""
        if any(of.is_used() for of in self.events):
            gc.collect()  # it may only be part of a cycle
        return next((of.line for of in self.events if of.is_used()), None)

    def note_function(self, code: CodeType) -> None:
        """Of Python."""
        if code in _HANDS_OVER:
            self._note_thread()
        elif code in _WAITS_FOR_THREAD:
            self._refuse("it waits for another thread; do that outside")

    def note_builtin(self, function: Any, frame: FrameType) -> None:
        """Of an extension: with the object whose method it is. frame: of the caller."""
        name = function.__name__
        if name not in _NAMES:
            return
        owner: Any = function.__self__
        if is_of(owner, torch.Generator):
            self._note_generator(owner, name, frame)
        elif is_of(owner, torch.Event):
            self._note_event(owner, name)
        elif is_of(owner, torch.Stream) and name in ("record_event", "wait_event"):
            if frame.f_code not in _ORDERS_STREAMS:
                self._refuse("it uses an event by a torch.Stream; use the event's record() and wait()")
        elif name in _STARTS_THREAD or (name == "put" and is_of(owner, queue.SimpleQueue)):
            self._note_thread()

    def _refuse(self, reason: str) -> None:
        self.refusals.append(f"{reason}{calling_line()}")

    def _note_generator(self, generator: torch.Generator, name: str, frame: FrameType) -> None:
        if not is_of_gpu(generator) or _keeps_state(frame):
            return
        if name in _SETS_GENERATOR:
            self._refuse("it sets the state of a random number generator of the GPU; set it outside")
        elif name in _READS_GENERATOR:
            self._refuse("it reads the seed or state of a generator of the GPU; read it outside")

    def _note_event(self, event: torch.Event, name: str) -> None:
        if name in _WAITS_FOR_EVENT:
            self._refuse("it asks for the time of an event, or waits for one; do that outside")
        elif name == "wait" and not any(of.is_event(event) for of in self.events):
            self._refuse("it makes a stream wait for an event of other work; do that outside")
        elif name == "record":
            self.events.append(_Recorded(_reference_to(event), calling_line()))

    def _note_thread(self) -> None:
        self._refuse("it hands work to another thread; do that outside")


def watch_functions(undo: Undo) -> CalledFunctions:
    """What this thread calls from now on. To be called where can_be_watched()."""
    found = CalledFunctions()
    other: Any = sys.getprofile()

    def look(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            found.note_builtin(arg, frame)
        elif event == "call":
            found.note_function(frame.f_code)
        if other is not None:
            other(frame, event, arg)

    def end() -> None:
        if sys.getprofile() is look:
            sys.setprofile(other)
        elif is_set:
            found.is_replaced = True
        is_set.clear()

    is_set = [True]
    undo.append(end)
    sys.setprofile(look)
    return found


def _reference_to(event: torch.Event) -> Any:
    try:
        return weakref.ref(event)
    except TypeError:
        return [event]


def is_of_gpu(generator: torch.Generator) -> bool:
    return bool(generator.device.type != "cpu")


def _keeps_state(frame: FrameType | None) -> bool:
    """Whether PyTorch calls a generator's method to put back later what it reads now."""
    while frame is not None and frame.f_code.co_filename.startswith(_PYTORCH):
        if frame.f_code in _KEEPS_STATE:
            return True
        frame = frame.f_back
    return False
