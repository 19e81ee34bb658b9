"""A training step, its data, and what tests of graphed callables ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import pygraph

from .graphed_world import Replaying


def replays(partitions: type[Replaying]) -> int:
    return sum(partition.replays for partition in partitions.all)


def reason() -> str:
    return next((row.reason for row in pygraph.stats() if row.reason), "")


class Training:
    def __init__(self, optimizer: Callable[..., Any], zero_first: bool = False) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.ReLU(), torch.nn.Linear(5, 3)
        )
        self.optimizer = optimizer(self.model.parameters())

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if zero_first:
                self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            if not zero_first:
                self.optimizer.zero_grad()
            return loss

        self.step = step

    def state(self) -> list[torch.Tensor]:
        moments = [value for of in self.optimizer.state.values() for value in of.values()]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        found = [*self.model.state_dict().values(), *moments, *gradients]
        return [t.clone() for t in found if isinstance(t, torch.Tensor)]


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def fused_sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator))
        for _ in range(count)
    ]


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), pygraph.stats()


class TwoDimensional(Training):
    """For Muon, which takes matrices only."""

    def __init__(self, optimizer: Callable[..., Any]) -> None:
        super().__init__(lambda parameters: optimizer([p for p in parameters if p.dim() == 2]))
        for parameter in self.model.parameters():
            parameter.requires_grad_(parameter.dim() == 2)


def training(name: str, **options: Any) -> Training:
    optimizers: Any = torch.optim
    at = TwoDimensional if name == "Muon" else Training
    return at(lambda parameters: getattr(optimizers, name)(parameters, **{"lr": 0.05, **options}))
