"""Clocks inside a call of a graphed callable: how long each of its parts takes, in the order and with
the caches that it has in a call.

The engine has clocks of its own (bindings/replay/replay_clocks.h). A call that is made by Python, as
all are with PYGRAPH_SHORT_CHECKS=0, has clocks around the functions that ask the same.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pygraph import runtime
from pygraph.callables import serving
from pygraph.callables.host.host_state import HostState
from pygraph.callables.refused_calls import RefusedCalls
from pygraph.callables.signature import Forms
from pygraph.callables.step_function import StepFunction
from pygraph.callables.variant import Variant

REST = "the rest"
_CALLS = 40  # of each kind
_IN_A_ROW = 7
_OF_THE_ENGINE = (
    "may it be served?",
    "arguments",
    "state, gradients",
    "host",
    "inputs",
    "- match arguments",
    "- stream",
    "- addresses",
    "- allocate",
    "- executable, memory",
    "- bind",
    "- launch",
    "- outputs",
    "- release arguments",
    "versions",
    "gradients left",
    "result",
)
_PARTS: tuple[tuple[Any, str, str], ...] = (
    (serving, "may_be_served", "may it be served?"),
    (Forms, "take_apart", "arguments"),
    (RefusedCalls, "has", "rules"),
    (Variant, "fits", "state, gradients"),
    (HostState, "holds", "host"),
    (Variant, "is_shared_by", "shared memory"),
    (StepFunction, "_rest", "rates"),
    (Variant, "_tell_autograd", "versions"),
    (StepFunction, "_leave_gradients", "gradients left"),
    (StepFunction, "_result", "result"),
)


class Clocks:
    """Microseconds by part of the calls since the last ``take``."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        clock, spent = time.perf_counter, self._spent

        @functools.wraps(function, updated=())
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                spent[part] = spent.get(part, 0.0) + clock() - start

        return timed

    def take(self, call: Callable[[], object]) -> dict[str, float]:
        """The parts of one call. (A clock takes some 0.2 us.)"""
        self._spent.clear()
        runtime.engine().replay_clocks(True)
        start = time.perf_counter()
        call()
        total = time.perf_counter() - start
        engine = dict(zip(_OF_THE_ENGINE, runtime.engine().replay_clocks(False), strict=True))
        by_python = dict(self._spent)
        if by_python:  # with the replay in one
            found = by_python | {part: of for part, of in engine.items() if part.startswith("-")}
            rest = total - sum(by_python.values())
        else:
            found, rest = engine, total - sum(engine.values())
        parts = {"in all": total} | found | {REST: rest}
        return {part: seconds * 1e6 for part, seconds in parts.items() if seconds != 0}


@contextlib.contextmanager
def running() -> Iterator[Clocks]:
    """While it lasts, all calls of graphed callables are clocked."""
    clocks = Clocks()
    with contextlib.ExitStack() as stack:
        for owner, name, part in _PARTS:
            original = vars(owner)[name]
            setattr(owner, name, clocks.around(part, original))
            stack.callback(setattr, owner, name, original)
        call = StepFunction.call

        def clocked(self: StepFunction, graphed: Any, *rest: Any) -> Any:
            return call(self, clocks.around("replay", graphed), *rest)

        StepFunction.call = clocked  # type: ignore[method-assign, assignment]
        stack.callback(setattr, StepFunction, "call", call)
        yield clocks


def columns(call: Callable[[], object], megabytes: int) -> dict[str, dict[str, float]]:
    """Medians by part, of calls: right after another one; after a sweep through so much memory; the
    first and the seventh of some in a row, during which a GPU works."""
    torch.set_num_threads(1)  # this core makes the sweep
    swept = torch.zeros(megabytes * 1024 * 1024, dtype=torch.uint8)
    with running() as clocks:
        found = {
            "warm": [_after(None, clocks, call) for _ in range(_CALLS)],
            "cold": [_after(swept, clocks, call) for _ in range(_CALLS)],
        }
        if torch.cuda.is_available():
            rows = [_in_a_row(clocks, call) for _ in range(_CALLS)]
            found |= {"first": [row[0] for row in rows], "seventh": [row[-1] for row in rows]}
    return {
        name: {
            part: statistics.median(of.get(part, 0.0) for of in calls)
            for part in dict.fromkeys(part for of in calls for part in of)
        }
        for name, calls in found.items()
    }


def _after(swept: torch.Tensor | None, clocks: Clocks, call: Callable[[], object]) -> dict[str, float]:
    """The GPU is idle."""
    call()
    if swept is not None:
        swept.add_(1)
    synchronize()
    return clocks.take(call)


def _in_a_row(clocks: Clocks, call: Callable[[], object]) -> list[dict[str, float]]:
    synchronize()
    return [clocks.take(call) for _ in range(_IN_A_ROW)]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
