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


def test_gradients_in_a_flat_tensor_that_the_call_writes(partitions: Any) -> None:
    """The gradient's memory has another counter than the flat tensor's."""
    p, flat = torch.nn.Parameter(torch.ones(4)), torch.zeros(4)
    p.grad = flat.data[:]

    def call(x: torch.Tensor) -> None:
        flat.zero_()
        (p * x).sum().backward()  # type: ignore[no-untyped-call]

    graphed = pygraph.graph(call)
    for _ in range(8):
        graphed(X)
    for read in (flat, p.grad):
        before = replays(partitions)
        w = torch.ones(4, requires_grad=True)
        product = (w * read).sum()
        graphed(X)
        assert replays(partitions) == before + 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()  # type: ignore[no-untyped-call]


def test_a_gradient_that_is_replaced_was_not_written(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))

    def call(x: torch.Tensor) -> None:
        gradient = p.grad
        p.grad = None
        (p * x).sum().backward()  # type: ignore[no-untyped-call]
        if gradient is not None:
            p.grad += gradient

    graphed = pygraph.graph(call)
    for _ in range(8):
        graphed(X)
    old = p.grad
    assert old is not None
    version = old._version
    graphed(X)
    assert old._version == version and p.grad is not old
