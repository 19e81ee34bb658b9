"""Steps whose independent kernels run at the same time (option ``lanes`` of ``pygraph.graph``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pygraph.verify import branches

from .graph_training import Training, adamw, assert_same_training, fused_sgd
from .support import captured


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches are used wherever results are the same, faster or not."""
    monkeypatch.setattr(branches, "is_faster", lambda chain, branched: True)
    monkeypatch.setattr(branches, "is_worth_its_memory", lambda chain, branched: True)


class Towers(nn.Module):
    """Two networks that do not need each other, such as the critics of an actor-critic method."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
            )
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (tower(x) for tower in self.towers)
        return first + second


def _compiled() -> Any:
    return torch.compile(Towers())


@pytest.mark.parametrize("optimizer", [adamw, fused_sgd])
@pytest.mark.parametrize("zero_first", [False, True])
def test_towers_run_beside_each_other_with_the_same_bits(
    optimizer: Callable[..., torch.optim.Optimizer], zero_first: bool
) -> None:
    assert_same_training(lambda: Training(_compiled, optimizer, zero_first), lanes=8)
    assert captured()[0].lanes >= 2


def test_clipping_and_autocast_beside_branches() -> None:
    assert_same_training(lambda: Training(_compiled, adamw, clips=True, autocast=True), lanes=8)


def test_an_eager_step_with_lanes_has_the_same_bits() -> None:
    """Most kernels of eager programs keep their order."""
    assert_same_training(lambda: Training(Towers, adamw), lanes=8)
