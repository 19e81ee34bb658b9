"""Steps with ``adapt_optimizers=True`` in calls that have no graph: their rates are tensors, too."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pygraph
from pygraph.callables import rate_probe

from . import frozen_world
from .graphed_programs import Training, assert_same, batches, reason, training
from .graphed_world import Replaying, partitions_of


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    monkeypatch.setattr(rate_probe, "_known", {})
    yield from partitions_of(lambda: frozen_world.install(monkeypatch))


@pytest.mark.parametrize("counts", [False, True])
def test_an_adapted_step_without_a_graph_rounds_as_one_with_a_graph(
    partitions: Any, counts: bool
) -> None:
    """Refused at once, or not observed any more: its rate is a tensor in all calls."""

    def train(graphed: bool) -> list[torch.Tensor]:
        at = training("Adam")
        calls = 0

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += counts
            noise = 0.0 if counts else torch.rand(()).item()
            loss: torch.Tensor = at.step(x + noise, y)
            return loss

        torch.manual_seed(0)
        made = pygraph.graph(step, adapt_optimizers=True)
        run = made if graphed else made.prepared()
        for x, y in batches(60):
            run(x, y)
            at.optimizer.param_groups[0]["lr"] *= 0.99
        return at.state()

    assert_same(train(True), train(False))
    assert partitions.all == [] and reason()


def test_an_exception_in_an_adapted_step_leaves_the_rate_a_number(partitions: Any) -> None:
    at = training("AdamW")
    step = pygraph.graph(at.step, adapt_optimizers=True)
    for x, y in batches(2):
        step(x, y)
    with pytest.raises(RuntimeError):
        step(torch.ones(6, 3), torch.zeros(6, dtype=torch.long))
    assert at.optimizer.param_groups[0]["lr"] == 0.05


def refused(name: str) -> tuple[Training, Any, list[Any]]:
    """A training whose step is refused at once, that step, and the rates that its calls have had."""
    at, seen = training(name), list[Any]()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(at.optimizer.param_groups[0]["lr"])
        return at.step(x + torch.rand(()).item(), y)

    return at, pygraph.graph(step, adapt_optimizers=True), seen


def test_adapted_steps_of_threads_may_wait_for_each_other(partitions: Any) -> None:
    both = threading.Barrier(2)

    def run() -> None:
        at = training("Adam")

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            both.wait(20)
            return at.step(x + torch.rand(()).item(), y)

        graphed = pygraph.graph(step, adapt_optimizers=True)
        for x, y in batches(4):
            graphed(x, y)
        assert isinstance(at.optimizer.param_groups[0]["lr"], float)
        ended.append(True)

    ended: list[bool] = []
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ended) == 2


def test_two_adapted_calls_of_one_optimizer_both_have_tensors(partitions: Any) -> None:
    """The one that begins later ends later: the first one must not take its tensor away."""
    at = training("Adam")
    begun, over = threading.Event(), threading.Event()
    seen: list[Any] = []

    def step(x: torch.Tensor, waits: bool) -> torch.Tensor:
        if waits:
            begun.set()
            over.wait(20)
        seen.append(at.optimizer.param_groups[0]["lr"])
        return x * torch.rand(()).item()

    graphed = pygraph.graph(step, adapt_optimizers=True)
    for waits in (False, True):
        over.set()
        graphed(torch.ones(4), waits)
    begun.clear()
    over.clear()
    other = threading.Thread(target=graphed, args=(torch.ones(4), True))
    other.start()
    begun.wait(20)
    graphed(torch.ones(4), False)
    over.set()
    other.join()
    assert all(isinstance(rate, torch.Tensor) for rate in seen) and len(seen) == 4
    assert at.optimizer.param_groups[0]["lr"] == 0.05


def test_a_checkpoint_is_adapted_where_calls_are_refused(partitions: Any) -> None:
    at, step, seen = refused("Adam")
    saved = copy.deepcopy(at.optimizer.state_dict())  # of the default form
    for i, (x, y) in enumerate(batches(4)):
        if i == 2:
            at.optimizer.load_state_dict(saved)
        step(x, y)
    assert all(isinstance(rate, torch.Tensor) for rate in seen)
    assert at.optimizer.param_groups[0]["capturable"] is True
    assert at.optimizer.param_groups[0]["lr"] == 0.05
