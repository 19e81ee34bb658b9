"""Callables by ``pygraph.graph`` inside of differentiated programs, against the same ones called
directly (gradient_world.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .gradient_programs import Pair, reasons, replays


def served(partitions: Any, forward: int = 3, backward: int = 3) -> bool:
    """Whether replays made calls, and nothing stayed uncaptured."""
    found = replays(partitions, "forward"), replays(partitions, "backward")
    assert found[0] >= forward and found[1] >= backward and not reasons(partitions), (
        found,
        reasons(partitions),
    )
    return True


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


MODULES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (
        lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)),
        (5, 4),
    ),
    "batch norm": (
        lambda: torch.nn.Sequential(
            torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU(inplace=True)
        ),
        (2, 2, 6, 6),
    ),
    "attention": (Attention, (2, 3, 8)),
    "gru cell": (lambda: torch.nn.GRUCell(4, 5), (2, 4)),
    "softmax": (lambda: torch.nn.Softmax(dim=-1), (3, 4)),
    "pool": (lambda: torch.nn.MaxPool1d(2), (2, 3, 4)),
    "layer norm": (lambda: torch.nn.LayerNorm(4), (3, 4)),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("needs", [(), (0,)])
def test_modules_of_many_kinds(gradients: Any, name: str, needs: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    make, shape = MODULES[name]
    pair = Pair(make())
    pair.steps(12, *shape, needs=needs)
    has_graph = needs or list(pair.plain.parameters())
    assert served(gradients) if has_graph else replays(gradients, "inference") >= 3
