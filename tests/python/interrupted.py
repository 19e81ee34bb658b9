"""Interrupts at each moment at which Python delivers them, in PyGraph's own code.

Python runs signal handlers where a function begins, after each call, and where a loop begins anew. A
tracer of instructions finds these moments in the frames of PyGraph's files, and raises at one of them.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

import pygraph

_FOLDER = str(Path(pygraph.__file__).parent)
_HANDLES_SIGNALS = {
    dis.opmap[name]
    for name in ("RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD")
    if name in dis.opmap
}
# Python 3.11's, where they jump.
_HANDLES_SIGNALS_BACK = {code for name, code in dis.opmap.items() if "JUMP_BACKWARD_IF" in name}

Moment = tuple[str, str, int]  # file, function, instruction


class HandlerError(Exception):
    """What the handler of a signal raises."""


def _handler(error: BaseException, frame: Any) -> NoReturn:
    raise error


@contextlib.contextmanager
def handling_signals() -> Iterator[None]:
    """The function that raises ``HandlerError`` is the handler of a signal."""
    before = signal.signal(signal.SIGUSR1, _handler)  # type: ignore[arg-type]
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@functools.cache
def _handlers(code: CodeType) -> list[tuple[int, int, int]]:
    """Which instructions are in a ``try``: from, to, where its handler is."""
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return [(entry.start, entry.end, entry.target) for entry in entries]


def _handler_of(code: CodeType, instruction: int) -> int | None:
    return next((to for a, b, to in _handlers(code) if a <= instruction < b), None)


@functools.cache
def _is_moment(code: CodeType, last: int, at: int) -> bool:
    """Whether an interrupt may come between two instructions of a frame. (Python raises it at the first
    one of them: not if only the second one, a ``return``, is outside of its ``try``.)"""
    if last < 0:
        return False
    is_jump_back = code.co_code[last] in _HANDLES_SIGNALS_BACK and at < last
    if code.co_code[last] not in _HANDLES_SIGNALS and not is_jump_back:
        return False
    return _handler_of(code, last) == _handler_of(code, at)


def _is_own(frame: FrameType) -> bool:
    """Whether it is PyGraph's, or one of contextlib's on its behalf."""
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename == contextlib.__file__:
        caller = caller.f_back
    return caller is not None and caller.f_code.co_filename.startswith(_FOLDER)


class Moments:
    """Those that come while ``run`` runs something, in order. Raises ``error`` at one of them, and
    ``again`` so many moments later."""

    def __init__(self, at: int = -1, error: BaseException | None = None, again: int = 0) -> None:
        self.seen: list[Moment] = []
        self.raised = 0  # how many times
        self._raises_at = {at, at + again}
        self._at = at
        self._error = error
        self._last: dict[FrameType, int] = {}  # the instruction of each frame
        self._is_removed = False  # by Python, because it has raised

    @property
    def is_over(self) -> bool:
        """Whether it has raised."""
        return len(self.seen) > self._at >= 0

    def run(self, call: Callable[[], Any]) -> Any:
        before = sys.gettrace(), sys.getprofile()
        sys.settrace(self._begin)
        sys.setprofile(self._put_back)
        try:
            return call()
        finally:
            sys.setprofile(before[1])
            sys.settrace(before[0])
            self._last.clear()

    def _put_back(self, frame: FrameType, event: str, arg: Any) -> None:
        """Python removes a tracer that has raised, but no profiler."""
        if not self._is_removed:
            return
        self._is_removed = False
        self._last.clear()
        sys.settrace(self._begin)
        caller: FrameType | None = frame
        while caller is not None:
            if _is_own(caller):
                caller.f_trace_opcodes, caller.f_trace_lines, caller.f_trace = True, False, self._step
            caller = caller.f_back

    def _begin(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not _is_own(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "return":
            self._last.pop(frame, None)
        elif event == "opcode":
            code, at = frame.f_code, frame.f_lasti
            last = self._last.get(frame, -1)
            self._last[frame] = at
            if _is_moment(code, last, at):
                self.seen.append((code.co_filename, code.co_qualname, at))
                if len(self.seen) - 1 in self._raises_at:
                    assert self._error is not None
                    self._is_removed = True
                    self.raised += 1
                    if isinstance(self._error, HandlerError):
                        _handler(self._error, frame)
                    raise self._error
        return self._step


def count(begin: Callable[[], Callable[[], Any]]) -> list[Moment]:
    """The moments of a call. begin: makes a program, and returns its call.

    Caches are warm in the second call; and Python 3.13 traces the instructions of a function from its
    second call on.
    """
    for _ in range(2):
        moments = Moments()
        moments.run(begin())
    return moments.seen


def prepare(begin: Callable[[], Callable[[], Any]]) -> None:
    """To be called before a moment is tried. After an exception, Python 3.13 does not trace the
    instructions of a function's first call any more."""
    if sys.version_info >= (3, 13):
        count(begin)


def choose(moments: list[Moment], most: int, seed: int) -> list[int]:
    """Numbers of moments: of each place in the code the first and the last one, at most so many."""
    import random

    first = {moment: i for i, moment in reversed(list(enumerate(moments)))}
    last = {moment: i for i, moment in enumerate(moments)}
    numbers = sorted({*first.values(), *last.values()})
    if len(numbers) > most:
        numbers = sorted(random.Random(seed).sample(numbers, most))
    return numbers
