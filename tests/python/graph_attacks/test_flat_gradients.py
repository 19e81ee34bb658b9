"""Gradients that are parts of one flat tensor, which the callable may reach, too."""

from __future__ import annotations

from typing import Any

import pytest
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


@pytest.mark.parametrize("number", [0, 1])
def test_one_of_two_gradients_leaves_their_memory(partitions: Any, number: int) -> None:
    def program() -> Any:
        parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
        flat = torch.zeros(8)
        for parameter, gradient in zip(parameters, flat.view(2, 4), strict=True):
            parameter.grad = gradient

        def call(x: torch.Tensor) -> None:
            ((parameters[0] * x).sum() + (parameters[1] * 2 * x).sum()).backward()

        return parameters, call

    (own, ours), (other, theirs) = program(), program()
    graphed = pygraph.graph(ours)
    for i in range(14):
        if i == 10:
            for parameters in (own, other):  # with the layout that it had
                memory = torch.zeros(8).view(2, 4)
                parameters[number].grad = memory[number]
        graphed(X)
        theirs(X)
        for a, b in zip(own, other, strict=True):
            assert torch.equal(a.grad, b.grad), f"call {i}, {replays(partitions)} replays"
    assert replays(partitions) >= 2


def test_a_flat_tensor_gets_other_memory(partitions: Any) -> None:
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
            flat.data, other.data = torch.ones(4), torch.ones(4)
        graphed(X)
        theirs(X)
        assert torch.equal(p.grad, q.grad), f"call {i}, {replays(partitions)} replays"
        assert torch.equal(flat, other)
