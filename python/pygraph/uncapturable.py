"""Operators found uncapturable: programs are compiled again, with cuts at them.

An operator that waits for the GPU, or copies from it, makes the capture of its whole partition fail.
The error's traceback names the operator: Inductor's code calls each operator on a line of its own. An
operator of PyTorch's that copies from host memory of its own at each call (lists of addresses, as
``_chunk_cat`` does) is captured, but cannot be in a graph that is used again, unless what it copies is
known to depend on sizes alone (``bindings/record/table_log.h``); there the engine's error names it.
From then on it cuts programs, like operators that are known to wait (operators.py): the parts before
and after it are in graphs. The program in which it was found is compiled again at its next call,
because a guard that PyGraph adds to each program fails then.
"""

from __future__ import annotations

import linecache
import re
import traceback
import weakref
from collections.abc import Collection
from typing import Any

import torch

from pygraph import dynamo_program, observations, runtime
from pygraph.runtime import AnyPartition

_CALL = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)")
# Of memory of its own: what copy_ copies from is an argument.
_COPIES_FROM_HOST = re.compile(
    r"operator (aten::(?!copy_|_to_copy)\w+), node \d+, a "
    r"(?:memcpy, uses other host memory|copy uses memory of the host)"
)
# The number of further compilations that Dynamo must allow. Beyond its limit it does not compile a
# function at all.
_COMPILATIONS_LEFT = 2

_found: dict[str, str] = {}  # why they cannot be captured, by name: "namespace::name"


def names() -> list[str]:
    """The operators that have been found uncapturable so far."""
    return list(_found)


def reason_of(name: str) -> str | None:
    """Why the operator of that name cuts programs; None if it does not."""
    return _found.get(name)


def operator_in(error: BaseException) -> str:
    """The operator that made a capture fail, from the error's traceback, or that copies from host
    memory of its own.

    Empty if no operator did, if the error is another one, which may not come back, or if the capture
    had failed before, unnoticed.
    """
    copies = _COPIES_FROM_HOST.search(str(error))
    if copies is not None:
        return copies[1]
    text = str(error).lower()
    if "captur" not in text or "previous error" in text:
        return ""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_code.co_name.startswith("partition"):  # Inductor's names
            call = _CALL.search(linecache.getline(frame.f_code.co_filename, line))
            return f"{call[1]}::{call[2]}" if call else ""
    return ""


class Compilation:
    """One compilation of a function by Dynamo, with its lazily compiled backward. It can be given up
    for another one with more cuts. Not thread-safe beyond Python's lock."""

    def __init__(self, cuts: Collection[str]) -> None:
        """cuts: operators that cut it. To be made while Dynamo compiles."""
        self._code = dynamo_program.code()
        self.cuts = frozenset(cuts)
        self._partitions: weakref.WeakSet[AnyPartition] = weakref.WeakSet()
        self.graphs: list[Any] = []  # that an observation has noted of it
        self._guarded = _GuardedState(self)
        self._is_expired = False
        self.has_guard = False

    def add_guard(self, gm: torch.fx.GraphModule) -> None:
        """Adds the guard that compiles the program again. Never raises.

        gm: as Dynamo gave it to the backend. A part of a program, and a program that is stored in a
        file, get no guard; operators found in them cut only programs that are compiled later.
        """
        with runtime.harmless("adding the guard for operators found uncapturable"):
            output = dynamo_program.current_with(gm)
            if output is not None and not dynamo_program.is_stored(output):
                dynamo_program.add_guard(output, self._guarded, _GuardedState.ATTRIBUTE)
                self.has_guard = True

    def add(self, partition: AnyPartition) -> None:
        """Adds one of the program's partitions."""
        self._partitions.add(partition)

    def note_uncapturable(self, operator: str, reason: str) -> bool:
        """Notes that an operator cannot be captured. Returns whether the program will be compiled
        again."""
        if not operator or operator in self.cuts:
            return False
        _found.setdefault(operator, reason)
        if not self.has_guard or not self._may_be_compiled_anew():
            return False
        self._is_expired = True
        self._guarded.ask()
        return True

    def is_current(self) -> bool:
        """False once the program should be compiled again, and may be. Never raises."""
        is_over = False
        with runtime.harmless("compiling anew, with more cuts,"):
            is_over = self._is_expired and self._may_be_compiled_anew()
            if is_over:
                self._leave_reports()
        return not is_over

    def _leave_reports(self) -> None:
        partitions = runtime.members(self._partitions)
        for partition in partitions:
            runtime.partitions.discard(partition)
        observation = observations.current()
        if observation is not None:
            observation.forget(self.graphs, partitions)

    def _may_be_compiled_anew(self) -> bool:
        return self._code is not None and dynamo_program.allows_recompilation(
            self._code, _COMPILATIONS_LEFT
        )


class _GuardedState:
    """The object whose attribute the guard reads. The attribute is in the object's dictionary until an
    operator is found; from then on the compilation computes it."""

    ATTRIBUTE = "is_current"

    def __init__(self, compilation: Compilation) -> None:
        self._compilation = weakref.ref(compilation)
        self.__dict__[self.ATTRIBUTE] = True

    def ask(self) -> None:
        """From now on the compilation computes the attribute."""
        self.__dict__.pop(self.ATTRIBUTE, None)

    def __getattr__(self, name: str) -> bool:
        if name != self.ATTRIBUTE:
            raise AttributeError(name)
        compilation = self._compilation()
        return compilation is None or compilation.is_current()
