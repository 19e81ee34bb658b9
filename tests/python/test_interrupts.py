"""Interrupts and errors at moments in PyGraph's own code, in calls of graphed callables.

One run of a program for each moment. Afterwards, while the exception is still alive: the state is that
of the uncaptured program before or after the call, and everything that PyGraph changes for a while is
as it was. Then the program goes on, with the uncaptured program's bits, and gets graphs.
`PYGRAPH_EVERY_MOMENT=1` tries all moments; otherwise some are chosen.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import pygraph
from pygraph import runtime
from pygraph.callables import rates, serving, variant

from . import frozen_world, gradient_world
from .contexts import capturing
from .graphed_programs import assert_same, replays
from .graphed_world import Replaying, partitions_of
from .interrupted import HandlerError, Moments, choose, count, handling_signals, prepare

_CALLS = 12
_MOST = 100_000 if os.environ.get("PYGRAPH_EVERY_MOMENT") == "1" else 6  # of one call
_CHANGES = 9  # the call before which the program changes an argument
_ERRORS = (KeyboardInterrupt, HandlerError, MemoryError, torch.OutOfMemoryError)


class _Again(frozen_world.Frozen):
    """As a partition does, it records again after an attempt that an interrupt has ended."""

    def callable(self, inputs: list[Any]) -> Any:
        before = self.calls
        try:
            return super().callable(inputs)
        except BaseException:
            self.calls = before if before < 4 else self.calls
            raise


class _Step:
    """A training step, by its number: of batches, and of the modes that it is called in."""

    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.parameter = torch.nn.Parameter(torch.ones(4))
        self.optimizer: Any = self.make([self.parameter])
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer)  # which the step can reach
        self.graphed: Any = None

    def make(self, parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, lr=0.1, fused=True)

    def graph(self) -> None:
        self.graphed = pygraph.graph(self.step, **self.options)

    def step(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = (x * self.parameter).sin().sum() * scale
        loss.backward()
        self.optimizer.step()
        return loss

    def call(self, number: int) -> torch.Tensor:
        x = torch.arange(4.0) + number
        run = self.graphed or self.step
        result: torch.Tensor = run(x, 1.0 if number < _CHANGES else 2.0)
        return result.detach().clone()

    def state(self) -> list[torch.Tensor]:
        moments = [value for of in self.optimizer.state.values() for value in of.values()]
        gradient = torch.empty(0) if self.parameter.grad is None else self.parameter.grad
        return [t.detach().clone() for t in (self.parameter, gradient, *moments)]

    @staticmethod
    def essential(state: list[torch.Tensor]) -> list[torch.Tensor]:
        """What an interrupt must leave as it was, or as it is to be."""
        return state


class _ClearingStep(_Step):
    """Which leaves no gradient."""

    def step(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        loss = super().step(x, scale)
        self.optimizer.zero_grad()
        return loss


class _AdaptedStep(_Step):
    """Whose rate is a tensor in uncaptured calls, too."""

    options = {"adapt_optimizers": True}  # noqa: RUF012

    def make(self, parameters: Any) -> Any:
        return torch.optim.Adam(parameters, lr=0.1, capturable=True)

    def call(self, number: int) -> torch.Tensor:
        if self.graphed is None:  # the rates that uncaptured calls have
            self.graphed = pygraph.graph(self.step, **self.options).prepared()
        return super().call(number)


class _Differentiated(_Step):
    """A step whose forward alone is graphed."""

    def graph(self) -> None:
        self.run = pygraph.graph(self.forward)
        self.graphed = self.step

    def __init__(self) -> None:
        super().__init__()
        self.run: Any = self.forward

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return (x * self.parameter).sin() * scale

    def step(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.run(x, scale).sum()
        loss.backward()
        self.optimizer.step()
        return loss

    @staticmethod
    def essential(state: list[torch.Tensor]) -> list[torch.Tensor]:
        """Without the gradient: the uncaptured program, too, may be interrupted with one or without."""
        return [state[0], *state[2:]]


def _without_plain_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier test may have replaced the method that PyTorch calls after `optimizer.step()`. An
    interrupt in it ends the uncaptured program, too, between this statement and the next one."""
    method = inspect.unwrap(torch.optim.Optimizer._optimizer_step_code)
    monkeypatch.setattr(torch.optim.Optimizer, "_optimizer_step_code", method)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    _without_plain_loops(monkeypatch)

    def install() -> type[Replaying]:
        frozen_world.install(monkeypatch)
        monkeypatch.setattr(variant, "Partition", _Again)
        return Replaying

    yield from partitions_of(install)


@pytest.fixture
def differentiated(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    _without_plain_loops(monkeypatch)
    yield from partitions_of(lambda: gradient_world.install(monkeypatch))


class _Expected:
    """States before each call of the uncaptured program, and results."""

    def __init__(self, kind: type[_Step]) -> None:
        program = kind()
        self.states, self.results = [program.state()], []
        for i in range(_CALLS):
            self.results.append(program.call(i))
            self.states.append(program.state())


def _begun(kind: type[_Step], calls: int) -> _Step:
    program = kind()
    program.graph()
    for i in range(calls):
        program.call(i)
    return program


def _is_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def _surroundings() -> Any:
    """What PyGraph changes for a while in this process and in this thread."""
    return (
        *(sys.stdout, sys.stderr, logging.getLogRecordFactory(), random.getstate()),
        *(
            torch.get_rng_state().tolist(),
            torch.is_grad_enabled(),
            torch._C._is_multithreading_enabled(),
        ),
        {**vars(torch.optim.lr_scheduler.LRScheduler)},
        *(serving.is_calling(), runtime.is_compared(), runtime.engine().are_operators_watched()),
    )


def _held_here(graphed: Any) -> list[str]:
    """Locks that another thread does not get."""
    found = []

    def ask() -> None:
        try:
            with capturing():
                pass
        except runtime.OthersDraw:
            found.append("capturing")
        locks = {"rates": rates._lock, "callable": getattr(graphed, "_lock", None)}
        for name, lock in locks.items():
            if lock is not None and not lock.acquire(blocking=False):
                found.append(name)
            elif lock is not None:
                lock.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found


def _check_moment(
    kind: type[_Step], number: int, moment: int, error: BaseException, expected: _Expected
) -> None:
    prepare(functools.partial(_call_of, kind, number))
    program = _begun(kind, number)
    memory, surroundings = program.parameter.data_ptr(), _surroundings()
    moments = Moments(moment, error)
    raised, result = None, torch.empty(0)
    try:
        with handling_signals():
            result = moments.run(lambda: program.call(number))
    except BaseException as caught:
        raised = caught
    assert moments.is_over, "this call has other moments than the one in which they were counted"
    # While the traceback holds all frames.
    assert _surroundings() == surroundings
    assert not _held_here(program.graphed)
    runtime.engine().CallObserver(lambda name: None).end()  # there is no other one
    assert program.parameter.data_ptr() == memory
    assert all(type(group["lr"]) is float for group in program.optimizer.param_groups)
    if raised is None:
        is_to_be_raised = type(error) in (KeyboardInterrupt, HandlerError)
        assert not is_to_be_raised, f"it was swallowed at {moments.seen[moment]}"
        assert torch.equal(result, expected.results[number])
    else:
        # (Of what fails in a recording, a partition of the engine's makes a reason.)
        assert raised is error or (isinstance(error, Exception) and raised.__cause__ is error)
    _check_state(program, number, raised is None, expected)
    before = replays(Replaying)
    for i in range(8):
        program.call(_CALLS + i)
    assert replays(Replaying) > before or not isinstance(error, KeyboardInterrupt)


def _check_state(program: _Step, number: int, is_over: bool, expected: _Expected) -> None:
    """It is that before or after the call, and the program goes on from there as it should."""
    now = program.essential(program.state())
    before, after = (program.essential(expected.states[i]) for i in (number, number + 1))
    is_made = is_over or not _is_same(now, before)
    assert_same(now, after if is_made else before)
    for i in range(number + is_made, _CALLS):
        assert torch.equal(program.call(i), expected.results[i])
    assert_same(program.state(), expected.states[-1])


def _call_of(kind: type[_Step], number: int) -> Callable[[], Any]:
    return functools.partial(_begun(kind, number).call, number)


def _moments_of(kind: type[_Step], number: int) -> list[int]:
    return choose(count(functools.partial(_call_of, kind, number)), _MOST, seed=number)


def _check_moments_of(kind: type[_Step], number: int) -> None:
    expected = _Expected(kind)
    chosen = _moments_of(kind, number)
    assert len(chosen) >= min(_MOST, 6)
    for i, moment in enumerate(chosen):
        _check_moment(kind, number, moment, _ERRORS[i % len(_ERRORS)]("injected"), expected)


@pytest.mark.parametrize("kind", [_Step, _ClearingStep, _AdaptedStep], ids=lambda k: k.__name__[1:])
@pytest.mark.parametrize("number", [0, 1, 2, 3, 7, _CHANGES])
def test_an_interrupt_leaves_a_step_before_or_after_the_call(
    running: Any, kind: type[_Step], number: int
) -> None:
    """Observed calls, the recording, a served call, and the first one with another argument."""
    _check_moments_of(kind, number)


@pytest.mark.parametrize("kind", [_Step, _ClearingStep], ids=lambda k: k.__name__[1:])
@pytest.mark.parametrize("number", [7, _CHANGES])
def test_an_interrupt_in_a_call_that_python_makes(
    running: Any, by_python: None, kind: type[_Step], number: int
) -> None:
    """As all calls with PYGRAPH_SHORT_CHECKS=0, and those that the engine leaves to Python."""
    _check_moments_of(kind, number)


@pytest.mark.parametrize("number", [0, 1, 2, 3, 7, _CHANGES])
def test_an_interrupt_in_a_differentiated_program(differentiated: Any, number: int) -> None:
    """In the graphed forward, or in its backward."""
    _check_moments_of(_Differentiated, number)
