"""Steps whose independent kernels run at the same time (option ``lanes`` of ``pygraph.graph``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pygraph.verify import branches

from .graph_training import Training, adamw, assert_same_training, batches, fused_sgd
from .support import captured


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches are used wherever results are the same, faster or not."""
    monkeypatch.setattr(branches, "is_faster", lambda chain, branched: True)
    monkeypatch.setattr(branches, "is_worth_its_memory", lambda chain, branched: True)


class Towers(nn.Module):
    """Two networks that do not need each other, such as the critics of an actor-critic method.

    Not their sum: the gradients of their last biases would be equal. Compiled code returns one memory
    for both, and clipping then multiplies it twice in one kernel: a race of the uncaptured program.
    """

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
        return first + 2 * second


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


class Sum(Towers):
    """The last biases have one gradient. Compiled code may return it as two tensors of one memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (tower(x) for tower in self.towers)
        return first + second


def test_gradients_that_share_memory_do_so_after_a_graph() -> None:
    def shared(training: Training) -> set[tuple[int, int]]:
        memory = [p.grad.data_ptr() for p in training.model.parameters() if p.grad is not None]
        assert len(memory) == 12
        return {(i, k) for i in range(12) for k in range(i) if memory[i] == memory[k]}

    def make() -> Training:
        return Training(lambda: torch.compile(Sum()), fused_sgd, zero_first=True, autocast=True)

    uncaptured = make()
    for x, y in batches(2):
        uncaptured.step(x, y)
    assert shared(assert_same_training(make, lanes=8)) == shared(uncaptured)
