"""Layers of one kind, compiled one by one: one graph finds the parameters of each."""

from __future__ import annotations

import copy

import pytest
import torch

from .support import assert_same, captured, randn, uncaptured

_LAYERS = 6


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def _layers() -> torch.nn.Sequential:
    layers = torch.nn.Sequential(*(Layer() for _ in range(_LAYERS))).cuda()
    for layer in layers:
        layer.compile(backend="pygraph")
    return layers


@torch.no_grad()
def test_one_graph_serves_all_layers() -> None:
    layers = _layers()
    inputs = [randn(8, 64) for _ in range(4)]
    with uncaptured():
        expected = [layers(x) for x in inputs]
    assert_same([layers(x) for x in inputs], expected)
    (row,) = captured()
    before = row.replays
    assert_same([layers(x) for x in inputs], expected)
    assert captured()[0].replays == before + 4 * _LAYERS


@pytest.mark.parametrize("optimizes", [False, True])
def test_training_has_one_graph_for_each_direction(optimizes: bool) -> None:
    layers = _layers()
    reference = copy.deepcopy(layers)
    models = (layers, reference)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(5):
        x = randn(8, 64)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            if model is layers:
                model(x).square().mean().backward()
            else:
                y = x
                for layer in model:
                    y = Layer.forward(layer, y)
                y.square().mean().backward()
            if optimizes:
                optimizer.step()
        for ours, theirs in zip(layers.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=f"step {step}")
    # The first layer's input needs no gradient, which makes two graphs; the others share theirs.
    rows = captured()
    assert sorted(row.name for row in rows) == ["backward"] * 2 + ["forward"] * 2, rows
    for name in ("forward", "backward"):
        assert max(row.replays for row in rows if row.name == name) >= 3 * (_LAYERS - 1)
