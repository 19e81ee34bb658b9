"""A replay that adds to gradients writes to tensors that the program may have used before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pygraph

from .attacked import X, replays


def test_a_backward_through_a_gradient_that_a_replay_has_added_to(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))

    def call(x: torch.Tensor) -> None:
        (p * x).sum().backward()  # type: ignore[no-untyped-call]

    graphed = pygraph.graph(call)
    for _ in range(8):
        graphed(X)
    before = replays(partitions)
    w = torch.ones(4, requires_grad=True)
    assert p.grad is not None
    product = (w * p.grad).sum()
    graphed(X)
    assert replays(partitions) == before + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()  # type: ignore[no-untyped-call]
