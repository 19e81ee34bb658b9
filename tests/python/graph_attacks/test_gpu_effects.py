"""Effects on the GPU that are no operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pygraph
from pygraph.callables.gpu_effects import is_seeded

from .attacked import X, replays


class Event:
    """In the place of torch.cuda.Event, of which there is none without a GPU."""

    def __init__(self) -> None:
        self.handle = 0

    def record(self) -> None:
        pass


@pytest.fixture(autouse=True)
def has_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)


class Timer:
    def __init__(self) -> None:
        self.events = [Event()]

    def measured(self, x: torch.Tensor) -> torch.Tensor:
        self.events[0].record()
        return x * 2


def test_a_step_that_records_an_event(partitions: Any) -> None:
    timer = Timer()
    graphed = pygraph.graph(timer.measured)
    for _ in range(12):
        graphed(X)
    assert replays(partitions) == 0
    (entry,) = graphed.entries.values()
    assert "it may record the event" in entry.reason and "events[0]" in entry.reason


def test_an_event_that_is_passed(partitions: Any) -> None:
    def step(x: torch.Tensor, event: Event) -> torch.Tensor:
        event.record()
        return x * 2

    graphed, event = pygraph.graph(step), Event()
    for _ in range(12):
        graphed(X, event)
    assert replays(partitions) == 0


def test_an_event_that_nothing_records(partitions: Any) -> None:
    events = [Event()]
    graphed = pygraph.graph(lambda x: x * len(events))
    for _ in range(12):
        graphed(X)
    assert replays(partitions) > 0


def test_an_event_of_the_steps_own(partitions: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        event = Event()
        event.record()
        return x * 2

    graphed = pygraph.graph(step)
    for _ in range(12):
        graphed(X)
    assert replays(partitions) > 0


def test_seeds_are_told_from_draws() -> None:
    assert not is_seeded((5, 0), (5, 4)) and not is_seeded((5, 4), (5, 4))
    assert is_seeded((5, 8), (5, 0)) and is_seeded((5, 0), (7, 4))
