"""What PyTorch's Python reads from global variables of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils import parametrizations, parametrize
from torch.optim.optimizer import register_optimizer_step_post_hook

import pygraph

from .attacked import X, adamw_step, replays


def test_hooks_of_all_optimizers(partitions: Any) -> None:
    _, _, step = adamw_step()
    run = pygraph.graph(step)
    for _ in range(8):
        run(X)
    called = []
    hook = register_optimizer_step_post_hook(lambda *_: called.append(1))
    try:
        for i in range(12):
            run(X)
            assert len(called) == i + 1
    finally:
        hook.remove()
    assert replays(partitions) > 0


def test_the_fast_path_of_attention(partitions: Any) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(1, 4, 8)
    run = pygraph.graph(torch.no_grad()(lambda x: layer(x)))
    try:
        for i in range(20):
            torch.backends.mha.set_fastpath_enabled(i < 10)
            with torch.no_grad():
                assert torch.equal(run(x), layer(x)), i
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert replays(partitions) > 0


def test_cached_parametrizations(partitions: Any) -> None:
    layer: Any = parametrizations.weight_norm(torch.nn.Linear(4, 4))
    run = pygraph.graph(torch.no_grad()(lambda x: layer(x)))
    for _ in range(8):
        run(X)
    with torch.no_grad(), parametrize.cached():
        expected = layer(X)  # its weight is kept
        layer.parametrizations.weight.original0.mul_(2)
        assert torch.equal(run(X), expected)
    with torch.no_grad():
        assert torch.equal(run(X), layer(X)) and not torch.equal(run(X), expected)
    assert replays(partitions) > 0
