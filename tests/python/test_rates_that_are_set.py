"""Steps that set the learning rate of their optimizer to the same number in each call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pygraph
from pygraph.callables import rate_probe

from . import gradient_world
from .graphed_programs import assert_same, batches, replays
from .graphed_world import Replaying, partitions_of

_STEPS = 30


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    monkeypatch.setattr(rate_probe, "_known", {})
    yield from partitions_of(lambda: gradient_world.install(monkeypatch))


def train(moves: range, graphs: bool) -> list[torch.Tensor]:
    """moves: steps before which the program sets another rate."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, fused=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.param_groups[0]["lr"] = 0.25
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = pygraph.graph(step) if graphs else step
    found = []
    for i, (x, _) in enumerate(batches(_STEPS)):
        if i in moves:
            optimizer.param_groups[0]["lr"] = 0.5 + 0.01 * i
        found += [run(x).clone(), torch.tensor(optimizer.param_groups[0]["lr"])]
    return [*found, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("moves", [range(0), range(_STEPS), range(20, _STEPS)])
def test_the_rate_is_that_of_the_step_after_each_call(partitions: Any, moves: range) -> None:
    assert_same(train(moves, True), train(moves, False))
    assert moves or replays(partitions) > 20, pygraph.stats()
