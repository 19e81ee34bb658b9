"""Interrupts at each moment in the calls of one partition: recording, verification, trial, audits.

As test_interrupts.py, which is about the callables' part. One run of a program for each moment.
Afterwards, while the exception is still alive: the call was made or it was not, and everything that
PyGraph changes for a while is as it was. Then the program goes on, with the uncaptured program's bits,
and ends as it would have ended. `PYGRAPH_EVERY_MOMENT=1` tries all moments; otherwise some are chosen.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pygraph import runtime
from pygraph.partition.signature import State
from pygraph.record import memory_pools, stream_capture

from .interrupted import HandlerError, Moments, choose, count, handling_signals, prepare
from .recorded_world import Program, World, is_free_for_others

_MOST = 100_000 if os.environ.get("PYGRAPH_EVERY_MOMENT") == "1" else 6  # of one call
_CALLS = 26
_WRONG_FROM = 12  # the first call whose replay would be wrong, in a program that becomes wrong


class _Kind:
    """A kind of program. calls: those that are interrupted, one by one."""

    options: dict[str, Any] = {"audit": 3}  # noqa: RUF012
    calls: tuple[int, ...] = (0, 1, 2, 3, 9, 10, 14)

    @staticmethod
    def begin(world: World, number: int) -> None:
        """Before each call."""

    @staticmethod
    def check_end(world: World, program: Program) -> None:
        entry = program.entry
        assert entry.state is State.CAPTURED and entry.selection.decision is not None
        assert world.engine.graphs == [entry.graph]
        assert entry.audits.made > 5


class _Refused(_Kind):
    """Its function raises where it is captured."""

    calls = (1, 2)

    @staticmethod
    def begin(world: World, number: int) -> None:
        world.gpu.raises_in_captures = True

    @staticmethod
    def check_end(world: World, program: Program) -> None:
        assert program.entry.state is State.REFUSED and "cannot be captured" in program.entry.reason
        assert world.engine.without_graph


class _Asks(_Kind):
    """Its function can be captured only where it is told that it is: it is recorded again."""

    calls = (1,)

    @staticmethod
    def begin(world: World, number: int) -> None:
        world.gpu.raises_in_captures = world.gpu.asks = True


class _Wrong(_Kind):
    """Its graph becomes wrong, which an audit finds."""

    options = {"audit": 1}  # noqa: RUF012
    calls = (_WRONG_FROM, _WRONG_FROM + 1)

    @staticmethod
    def begin(world: World, number: int) -> None:
        world.gpu.extra = 1.0 if number >= _WRONG_FROM else 0.0

    @staticmethod
    def check_end(world: World, program: Program) -> None:
        assert program.entry.state is State.REFUSED and "an audit found" in program.entry.reason
        assert world.engine.graphs == []


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def _surroundings(world: World) -> Any:
    return (
        *world.gpu.surroundings(),
        *(gc.isenabled(), runtime.is_compared(), bool(runtime._pauses), world.engine.observers),
        *(torch.is_grad_enabled(), _is_operator_direct()),
    )


@torch.library.custom_op("pygraph_test::interrupted", mutates_args=())
def _operator(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def _is_operator_direct() -> bool:
    return bool(getattr(torch.ops.pygraph_test.interrupted.default, "_pyobj_dispatcher", None))


def _call(world: World, kind: type[_Kind], program: Program, number: int) -> None:
    kind.begin(world, number)
    result = program.call(number)
    assert torch.equal(result, program.expected(number, world.gpu.extra)), number


def _begun(world: World, kind: type[_Kind], calls: int) -> Program:
    program = world.program(**kind.options)
    for number in range(calls):
        _call(world, kind, program, number)
    kind.begin(world, calls)
    return program


def _check_moment(world: World, kind: type[_Kind], number: int, moments: Moments) -> None:
    prepare(functools.partial(_call_of, world, kind, number))
    program = _begun(world, kind, number)
    surroundings = _surroundings(world)
    raised = None
    try:
        with handling_signals():
            moments.run(functools.partial(program.call, number))
    except (KeyboardInterrupt, HandlerError) as caught:
        raised = caught
    assert moments.is_over, "this call has other moments than the one in which they were counted"
    # While the traceback holds all frames.
    assert raised is not None, f"it was swallowed: {moments.seen[-1]} is the last moment"
    assert _surroundings(world) == surroundings
    assert not runtime.record_lock.locked()
    assert is_free_for_others()
    state = program.state()
    assert state in (program.state_before(number), program.state_before(number + 1))
    del raised
    for i in range(number + (state != program.state_before(number)), _CALLS):
        _call(world, kind, program, i)
        assert program.state() == program.state_before(i + 1)
    kind.check_end(world, program)
    stream_capture.check_interrupted()
    assert stream_capture._interrupted == stream_capture._abandoned == []
    assert all(pool.uses == 0 for pool in world.gpu.pools if pool.was_used)
    assert not memory_pools._waiting


def _call_of(world: World, kind: type[_Kind], number: int) -> Callable[[], Any]:
    return functools.partial(_begun(world, kind, number).call, number)


def _moments_of(world: World, kind: type[_Kind], number: int) -> list[int]:
    return choose(count(functools.partial(_call_of, world, kind, number)), _MOST, seed=number)


_CASES = [(kind, number) for kind in (_Kind, _Refused, _Asks, _Wrong) for number in kind.calls]
_by_case: Callable[..., Any] = pytest.mark.parametrize(
    ("kind", "number"), _CASES, ids=[f"{kind.__name__[1:]}-{number}" for kind, number in _CASES]
)


@_by_case
def test_an_interrupt_leaves_nothing_behind(world: World, kind: type[_Kind], number: int) -> None:
    chosen = _moments_of(world, kind, number)
    assert len(chosen) >= min(_MOST, 6)
    for i, moment in enumerate(chosen):
        error = (KeyboardInterrupt, HandlerError)[i % 2]("injected")
        _check_moment(world, kind, number, Moments(moment, error))


@_by_case
def test_two_interrupts_in_a_row_leave_nothing_behind(
    world: World, kind: type[_Kind], number: int
) -> None:
    """The second one comes while the first one is on its way, in what puts things back."""
    raised = 0
    for i, moment in enumerate(_moments_of(world, kind, number)):
        moments = Moments(moment, KeyboardInterrupt("injected"), again=1 + i % 4)
        _check_moment(world, kind, number, moments)
        raised = max(raised, moments.raised)
    assert raised == 2
