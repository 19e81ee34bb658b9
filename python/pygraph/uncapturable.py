"""Operators that turned out not to be capturable: programs are compiled anew, with cuts at them.

An operator that waits for the GPU, or copies from it, makes the capture of its whole partition fail.
Which one it was, the error's traceback shows: Inductor's code calls each operator on a line of its own.
From then on it cuts programs, like those that are known to wait (operators.py): what is before and
after it is in graphs. The program that it was found in is compiled anew at its next call, because one
of its guards fails then.
"""

from __future__ import annotations

import linecache
import re
import traceback
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch._dynamo import eval_frame, symbolic_convert

from pygraph import observations, runtime
from pygraph.runtime import AnyPartition

_CALL = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)")
# Dynamo gives a function up that it has compiled too often: so many more times must be left.
_COMPILATIONS_LEFT = 2

_learned: dict[str, str] = {}  # why they cannot be captured, by name: "namespace::name"


def names() -> list[str]:
    """The operators that have been learned so far."""
    return list(_learned)


def reason_of(name: str) -> str | None:
    """Why the operator of that name cuts programs; None if it does not."""
    return _learned.get(name)


def operator_in(error: BaseException) -> str:
    """The operator that a partition was calling when it raised because of the capture.

    Empty if it was none, or another error, which may be gone the next time; or if the capture had
    failed before, unnoticed.
    """
    text = str(error).lower()
    if "captur" not in text or "previous error" in text:
        return ""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_code.co_name.startswith("partition"):  # Inductor's names
            call = _CALL.search(linecache.getline(frame.f_code.co_filename, line))
            return f"{call[1]}::{call[2]}" if call else ""
    return ""


class Compilation:
    """One compilation of a function by Dynamo, with its lazily compiled backward. Can be given up, for
    another one with more cuts. Not thread-safe beyond Python's lock."""

    def __init__(self, cuts: Collection[str]) -> None:
        """cuts: operators that cut it. To be made while Dynamo compiles."""
        translator = getattr(symbolic_convert.tls, "current_tx", None)
        self._code = translator.output.root_tx.f_code if translator is not None else None
        self.cuts = frozenset(cuts)
        self._partitions: weakref.WeakSet[AnyPartition] = weakref.WeakSet()
        self.graphs: list[Any] = []  # that an observation has noted of it
        # What it is to be compiled anew for. The engine's guard looks whether there is anything.
        self.expired: list[str] = []
        self.has_guard = False

    def add(self, partition: AnyPartition) -> None:
        """One of its partitions."""
        self._partitions.add(partition)

    def learn(self, operator: str, reason: str) -> bool:
        """Notes that an operator cannot be captured; whether it will be compiled anew for that."""
        if not operator or operator in self.cuts:
            return False
        _learned.setdefault(operator, reason)
        if not self.has_guard or not self._may_be_compiled_anew():
            return False
        self.expired.append(operator)
        return True

    def holds(self) -> bool:
        """For the guard: False once it is to be compiled anew, and may be. Never raises."""
        is_over = False
        with runtime.harmless("compiling anew, with more cuts,"):
            is_over = bool(self.expired) and self._may_be_compiled_anew()
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
        config = torch._dynamo.config
        if self._code is None or config.error_on_recompile or eval_frame._stance.stance != "default":
            return False
        made = len(eval_frame._debug_get_cache_entry_list(self._code))
        return bool(made + _COMPILATIONS_LEFT <= config.recompile_limit)
