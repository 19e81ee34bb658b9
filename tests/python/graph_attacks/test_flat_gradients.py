"""Gradients that are parts of one flat tensor, which the callable may reach, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pygraph

from .attacked import X, replays


class _Flat:
    """A parameter whose gradient lies in a flat tensor, which the step clears."""

    def __init__(self) -> None:
        self.p = torch.nn.Parameter(torch.ones(4))
        self.flat = torch.zeros(4)
        self.p.grad = self.flat[:]

    def call(self, x: torch.Tensor) -> None:
        self.flat.zero_()
        (self.p * x).sum().backward()  # type: ignore[no-untyped-call]

    def replace_gradient(self) -> None:
        self.p.grad = torch.ones(4)

    def replace_memory_of_flat(self) -> None:
        self.flat.data = torch.ones(4)


@pytest.mark.parametrize("change", [_Flat.replace_gradient, _Flat.replace_memory_of_flat])
def test_a_gradient_and_a_flat_tensor_part(partitions: Any, change: Any) -> None:
    ours, theirs = _Flat(), _Flat()
    graphed = pygraph.graph(ours.call)
    for i in range(14):
        if i == 10:
            assert replays(partitions) >= 2
            change(ours)
            change(theirs)
        graphed(X)
        theirs.call(X)
        assert ours.p.grad is not None and theirs.p.grad is not None
        assert torch.equal(ours.p.grad, theirs.p.grad), f"call {i}, {replays(partitions)} replays"
        assert torch.equal(ours.flat, theirs.flat)


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
