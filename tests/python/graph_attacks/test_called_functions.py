"""What a step calls that a replay would not do: it records events, and seeds generators of the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph
from pygraph.callables import called_functions

from .attacked import X, replays


def _reason(function: Any, *args: Any) -> str:
    """Why it has no graph; empty if it has one."""
    graphed = pygraph.graph(function)
    for _ in range(12):
        graphed(*(args or (X,)))
    return next((row.reason for row in pygraph.stats() if row.reason), "")


def _assert_refused(partitions: Any, function: Any, text: str) -> None:
    reason = _reason(function)
    assert text in reason, reason
    assert "(test_called_functions.py:" in reason
    assert replays(partitions) == 0


def _record(event: Any) -> None:
    """On a machine without a GPU the call is made, and fails. (PyTorch's Python asks for the current
    stream first, unless it is given one.)"""
    of_cuda = isinstance(event, torch.cuda.Event)
    with contextlib.suppress(RuntimeError, TypeError):
        event.record(*(["no stream"] if of_cuda else []))


@pytest.mark.parametrize("kind", [torch.Event, torch.cuda.Event])
@pytest.mark.parametrize("place", ["closure", "set", "default"])
def test_an_event_is_recorded(partitions: Any, kind: Any, place: str) -> None:
    event = kind()
    events = {event} if place == "set" else ()

    def in_closure(x: torch.Tensor) -> torch.Tensor:
        for of in events or (event,):
            _record(of)
        return x * 2

    def in_default(x: torch.Tensor, of: Any = event) -> torch.Tensor:
        _record(of)
        return x * 2

    step = in_default if place == "default" else in_closure
    _assert_refused(partitions, step, "it records an event that outlives the call")


def test_a_method_that_records_is_kept(partitions: Any) -> None:
    record = torch.Event().record

    def step(x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError):
            record()
        return x * 2

    _assert_refused(partitions, step, "it records an event that outlives the call")


@pytest.mark.parametrize("is_in_a_cycle", [False, True])
def test_an_event_of_the_steps_own_does_no_harm(partitions: Any, is_in_a_cycle: bool) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        if is_in_a_cycle:
            event.itself = event
        _record(event)
        return x * 2

    assert _reason(step) == ""
    assert replays(partitions) > 0


@pytest.mark.parametrize("name", ["query", "synchronize"])
def test_an_event_is_asked(partitions: Any, name: str) -> None:
    event = torch.Event()

    def step(x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError):
            getattr(event, name)()
        return x * 2

    _assert_refused(partitions, step, "it asks for the time of an event, or waits for one")


def test_a_stream_waits_for_other_work(partitions: Any) -> None:
    event = torch.Event()

    def step(x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError):
            event.wait()
        return x * 2

    _assert_refused(partitions, step, "it makes a stream wait for an event of other work")


@pytest.mark.parametrize("kind", [torch.Event, torch.cuda.Event])
def test_a_stream_waits_for_the_steps_own_work(partitions: Any, kind: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        event = kind()
        _record(event)
        with contextlib.suppress(RuntimeError, TypeError):
            torch.Event.wait(event)
        return x * 2

    assert _reason(step) == ""
    assert replays(partitions) > 0


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """One that counts as the GPU's."""
    found = torch.Generator().manual_seed(7)
    monkeypatch.setattr(called_functions, "is_of_gpu", lambda generator: generator is found)
    return found


def _set_state(generator: torch.Generator) -> None:
    generator.set_state(torch.Generator().manual_seed(7).get_state())


_SEEDING: dict[str, Callable[[torch.Generator], object]] = {
    "manual_seed": lambda generator: generator.manual_seed(7),
    "set_state": _set_state,
}


@pytest.mark.parametrize("way", _SEEDING)
def test_a_generator_of_the_gpu_is_seeded(
    partitions: Any, generator: torch.Generator, way: str
) -> None:
    seed = _SEEDING[way]

    def step(x: torch.Tensor) -> torch.Tensor:
        seed(generator)
        return x * 2

    _assert_refused(partitions, step, "it sets the state of a random number generator of the GPU")


def test_the_seed_of_the_gpu_is_read(partitions: Any, generator: torch.Generator) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * (generator.initial_seed() % 5)

    _assert_refused(partitions, step, "it reads the seed or state of a generator of the GPU")


def test_other_generators_may_be_asked(partitions: Any, generator: torch.Generator) -> None:
    other = torch.Generator()

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * (other.initial_seed() % 5)

    assert _reason(step) == ""
    assert replays(partitions) > 0


def test_pytorch_puts_back_what_it_has_read(partitions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As checkpointing does."""
    monkeypatch.setattr(called_functions, "is_of_gpu", lambda generator: True)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            return x * 2

    assert _reason(step) == ""
    assert replays(partitions) > 0


def test_a_seed_within_a_fork(partitions: Any, generator: torch.Generator) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            generator.manual_seed(7)
            return x * 2

    _assert_refused(partitions, step, "it sets the state of a random number generator of the GPU")
