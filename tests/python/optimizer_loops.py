"""A plain training loop, and what tests of optimizers in it ask (frozen_world.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pygraph import options
from pygraph.callables import gradient_clips, optimizer_steps, trained

from . import frozen_world
from .graphed_programs import assert_same, batches
from .graphed_world import Replaying, partitions_of

OPTIONS = options.own({"patches": "exact"})  # whatever PYGRAPH_PATCHES says


def loops(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    """For the fixture ``partitions``."""
    optimizer_steps.install()
    gradient_clips.install()
    yield from partitions_of(lambda: frozen_world.install(monkeypatch))


class Loop:
    """A model, its optimizer, and a plain loop around them."""

    def __init__(self, optimizer: Callable[..., Any], graphs: bool = True) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
        self.optimizer = optimizer(self.model.parameters())
        if graphs:
            trained.note_program(self.model.parameters(), OPTIONS)

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        return loss.detach()

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.backward(x, y)
        self.optimizer.step()
        return loss

    def state(self) -> list[torch.Tensor]:
        moments = [value for of in self.optimizer.state.values() for value in of.values()]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        found = [*self.model.state_dict().values(), *moments, *gradients]
        return [t.clone() for t in found if isinstance(t, torch.Tensor)]


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.05, fused=True)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


Train = Callable[[Loop], Any]


def plainly(loop: Loop) -> None:
    for x, y in batches(14):
        loop.step(x, y)


def assert_trains_alike(train: Train, optimizer: Callable[..., Any] = adamw) -> Loop:
    expected, loop = Loop(optimizer, graphs=False), Loop(optimizer)
    train(expected)
    train(loop)
    assert not hasattr(expected.optimizer.step, "pygraph_route")
    assert_same(loop.state(), expected.state())
    return loop
