"""Gradients that are parts of one flat tensor, which the callable may reach, too."""

from __future__ import annotations

from typing import Any

import torch

import pygraph

from .attacked import X, replays


def test_a_gradient_leaves_the_memory_of_a_flat_tensor(partitions: Any) -> None:
    def program() -> Any:
        p = torch.nn.Parameter(torch.ones(4))
        flat = torch.zeros(4)
        p.grad = flat[:]

        def call(x: torch.Tensor) -> None:
            flat.zero_()
            (p * x).sum().backward()

        return p, flat, call

    (p, flat, ours), (q, other, theirs) = program(), program()
    graphed = pygraph.graph(ours)
    for i in range(14):
        if i == 10:
            p.grad, q.grad = torch.ones(4), torch.ones(4)
        graphed(X)
        theirs(X)
        assert torch.equal(p.grad, q.grad), f"call {i}, {replays(partitions)} replays"
        assert torch.equal(flat, other)
    assert replays(partitions) >= 2
