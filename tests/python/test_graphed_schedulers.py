"""Learning-rate schedulers that a step can reach: a trainer's, in an attribute beside its model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, ReduceLROnPlateau

import pygraph

from .graphed_programs import assert_same, batches, reason, replays


class Trainer:
    """The step is a method, and the loop steps the scheduler."""

    def __init__(self, schedule: Callable[[Any], Any]) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        self.scheduler = schedule(self.optimizer)
        self.logs_rates = False
        self.rate = 0.0

    def train_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.logs_rates:
            return loss * self.scheduler.get_last_lr()[0]
        return loss

    def state(self) -> list[torch.Tensor]:
        moments = [value for of in self.optimizer.state.values() for value in of.values()]
        return [*self.model.state_dict().values(), *moments]


def exponential(optimizer: Any) -> Any:
    return ExponentialLR(optimizer, 0.9)


def plateau(optimizer: Any) -> Any:
    return ReduceLROnPlateau(optimizer, patience=1)


def hooks() -> list[Any]:
    return [vars(LRScheduler).get(name) for name in ("__getattribute__", "__setattr__")]


@pytest.mark.parametrize("schedule", [exponential, plateau])
def test_a_scheduler_that_the_loop_steps(partitions: Any, schedule: Any) -> None:
    before = hooks()
    uncaptured, at = Trainer(schedule), Trainer(schedule)
    step = pygraph.graph(at.train_step)
    for x, y in batches(14):
        expected = uncaptured.train_step(x, y)
        assert torch.equal(step(x, y), expected)
        for of in (uncaptured, at):
            of.scheduler.step(*([1.0] if schedule is plateau else []))
    assert_same(at.state(), uncaptured.state())
    assert len(partitions.all) == 1 and replays(partitions) >= 8
    assert hooks() == before


def test_a_scheduler_whose_rate_the_step_reads(partitions: Any) -> None:
    uncaptured, at = Trainer(exponential), Trainer(exponential)
    uncaptured.logs_rates = at.logs_rates = True
    step = pygraph.graph(at.train_step)
    for x, y in batches(12):
        expected = uncaptured.train_step(x, y)
        assert torch.equal(step(x, y), expected)
        for of in (uncaptured, at):
            of.scheduler.step()
    assert partitions.all == []
    assert (
        reason() == "it reads train_step.__self__.scheduler, a learning-rate scheduler; read it outside"
    )


def test_a_step_that_begins_to_read_the_rate(partitions: Any) -> None:
    uncaptured, at = Trainer(exponential), Trainer(exponential)
    step = pygraph.graph(at.train_step)
    for i, (x, y) in enumerate(batches(24)):
        uncaptured.logs_rates = at.logs_rates = 10 <= i < 16
        expected = uncaptured.train_step(x, y)
        assert torch.equal(step(x, y), expected)
        assert ("learning-rate scheduler" in reason()) == (11 <= i < 16)
        for of in (uncaptured, at):
            of.scheduler.step()
    assert_same(at.state(), uncaptured.state())
    assert replays(partitions) >= 10


def test_another_scheduler_is_noticed(partitions: Any) -> None:
    """What is in its place may be anything that the step then uses."""
    uncaptured, at = Trainer(exponential), Trainer(exponential)
    step = pygraph.graph(at.train_step)
    for i, (x, y) in enumerate(batches(16)):
        if i == 8:
            for of in (uncaptured, at):
                of.scheduler = exponential(of.optimizer)
        assert torch.equal(step(x, y), uncaptured.train_step(x, y))
    assert len(partitions.all) == 2


class Hidden(ExponentialLR):
    """Its attributes are read past PyTorch's class."""

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


def test_a_scheduler_whose_reads_cannot_be_seen_is_watched(partitions: Any) -> None:
    uncaptured, at = (Trainer(lambda of: Hidden(of, 0.9)) for _ in range(2))
    uncaptured.logs_rates = at.logs_rates = True
    step = pygraph.graph(at.train_step)
    for x, y in batches(14):
        assert torch.equal(step(x, y), uncaptured.train_step(x, y))
        for of in (uncaptured, at):
            of.scheduler.step()
    assert replays(partitions) == 0 and "differs from call to call" in reason()


def test_what_other_threads_do_with_a_scheduler_does_not_count(partitions: Any) -> None:
    at = Trainer(exponential)
    step = pygraph.graph(at.train_step)
    over = threading.Event()

    def log() -> None:
        while not over.is_set():
            at.scheduler.get_last_lr()

    other = threading.Thread(target=log)
    other.start()
    try:
        for x, y in batches(10):
            step(x, y)
    finally:
        over.set()
        other.join()
    assert replays(partitions) >= 5
