"""Models, optimizers and steps for tests of ``pygraph.graph``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

import pygraph

from .support import captured

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Training:
    """A model, its optimizer and a step, all of which are the same at each construction."""

    def __init__(
        self,
        model: Callable[[], torch.nn.Module],
        optimizer: Callable[[Iterator[torch.nn.Parameter]], torch.optim.Optimizer],
        zero_first: bool = False,
        clips: bool = False,
        autocast: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.model = model().cuda()
        self.optimizer = optimizer(self.model.parameters())

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if zero_first:
                self.optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            if not zero_first:
                self.optimizer.zero_grad()
            return loss

        self.step: Step = step

    def state(self) -> list[torch.Tensor]:
        moments = [
            value
            for of in self.optimizer.state.values()
            for value in of.values()
            if isinstance(value, torch.Tensor)
        ]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [t.clone() for t in (*self.model.state_dict().values(), *moments, *gradients)]


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 10)
    )


def normed() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.GELU(), torch.nn.Linear(64, 10)
    )


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator("cuda").manual_seed(1)
    return [
        (
            torch.randn(16, 32, device="cuda", generator=generator),
            torch.randint(0, 10, (16,), device="cuda", generator=generator),
        )
        for _ in range(count)
    ]


def assert_same_training(make: Callable[[], Training], steps: int = 12, **options: Any) -> Training:
    """Trains uncaptured and by a graph, and compares losses, parameters, moments and gradients."""
    uncaptured, graphed = make(), make()
    step = pygraph.graph(graphed.step, **options)
    data = batches(steps)
    torch.manual_seed(2)
    expected = [uncaptured.step(x, y).detach() for x, y in data]
    torch.manual_seed(2)
    losses = [step(x, y) for x, y in data]
    assert not any(loss.requires_grad for loss in losses)
    for i, (a, b) in enumerate(zip(losses, expected, strict=True)):
        assert torch.equal(a, b), f"loss {i}: {a} {b}; {pygraph.stats()}"
    for a, b in zip(graphed.state(), uncaptured.state(), strict=True):
        assert torch.equal(a, b), pygraph.stats()
    assert [row.replays for row in captured()], pygraph.stats()
    assert max(row.replays for row in captured()) >= 5, pygraph.stats()
    return graphed


def fused_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=1e-2, fused=True)
