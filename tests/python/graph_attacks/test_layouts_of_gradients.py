"""Gradients from before a call, to which it adds: their layout, and hooks of the nodes that add."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph

from .attacked import open_to_this, replays


class _Program:
    def __init__(self) -> None:
        self.p = torch.nn.Parameter(torch.arange(16.0).reshape(4, 4))
        self.q = torch.nn.Parameter(torch.ones(4))
        self.flat = torch.zeros(8)

    def call(self, x: torch.Tensor) -> torch.Tensor:
        loss = (self.p * x).square().sum() + (self.q * x).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def _transposed(of: _Program) -> None:
    of.p.grad = torch.arange(16.0).reshape(4, 4).t()


def _negated(of: _Program) -> None:
    of.q.grad = torch._neg_view(torch.full((4,), 5.0))


def _behind(of: _Program) -> None:
    """Before: the first half of the same memory."""
    of.q.grad = of.flat[4:]


@pytest.mark.parametrize("change", [_transposed, _negated, _behind])
def test_another_layout(partitions: Any, change: Callable[[_Program], None]) -> None:
    ours, theirs = _Program(), _Program()
    graphed = pygraph.graph(ours.call)
    for of in (ours, theirs):
        of.p.grad, of.q.grad = torch.zeros(4, 4), of.flat[:4]
    for i in range(14):
        if i == 10:
            change(ours)
            change(theirs)
        x = torch.full((4,), i + 1.0) + torch.arange(4.0)
        graphed(x)
        theirs.call(x)
        for name in ("p", "q"):
            a, b = getattr(ours, name).grad, getattr(theirs, name).grad
            assert torch.equal(a, b), (
                f"call {i}: {name}.grad is {a} for {b}, {replays(partitions)} replays"
            )


def _hook(parameter: torch.nn.Parameter, is_before: bool) -> Any:
    """Keeps the node alive."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    if is_before:
        return node.register_prehook(lambda gradients: (3 * gradients[0],)), node

    def triple(*_: Any) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(3)

    return node.register_hook(triple), node


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize("is_hooked_first", [True, False])
def test_a_hook_of_the_node_that_accumulates(
    partitions: Any, is_before: bool, is_held: bool, is_hooked_first: bool
) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    node = torch.autograd.graph.get_gradient_edge(p).node if is_held else None

    def call(x: torch.Tensor) -> torch.Tensor:
        p.grad = None
        (p * x).sum().backward()  # type: ignore[no-untyped-call]
        assert p.grad is not None
        return p.grad.clone()

    x = torch.arange(4.0)
    graphed = pygraph.graph(call)
    first = _hook(p, is_before) if is_hooked_first else None
    for _ in range(8):
        graphed(x)
    hooked = _hook(p, is_before)
    assert torch.equal(graphed(x), (9 if is_hooked_first else 3) * x), f"{replays(partitions)} replays"
    del node, first, hooked


def test_a_hook_where_no_backward_runs(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    hooked = _hook(p, is_before=True)
    graphed = pygraph.graph(torch.no_grad()(lambda x: p.mul_(2) * x))
    for i in range(8):
        assert torch.equal(graphed(torch.ones(4)), torch.full((4,), 2.0 ** (i + 1)))
    assert replays(partitions) > 2
    del hooked


def test_hooks_of_the_node_that_accumulates_from_the_start(partitions: Any) -> None:
    layer = torch.nn.Linear(4, 1, bias=False)
    node = torch.autograd.graph.get_gradient_edge(layer.weight).node
    scale = [3.0]
    node.register_prehook(lambda gradients: (scale[0] * gradients[0],))

    def call(x: torch.Tensor) -> None:
        layer(x).sum().backward()
        layer.zero_grad()

    graphed = pygraph.graph(call)
    for _ in range(8):
        graphed(torch.arange(4.0))
    assert any("layer.weight has hooks" in row.reason for row in pygraph.stats())


@open_to_this
def test_a_hook_of_the_node_that_accumulates_was_removed(partitions: Any) -> None:
    """The node keeps an empty list of them, for which the step is refused."""
    layer = torch.nn.Linear(4, 1, bias=False)
    node = torch.autograd.graph.get_gradient_edge(layer.weight).node
    node.register_prehook(lambda gradients: gradients).remove()

    def call(x: torch.Tensor) -> None:
        layer(x).sum().backward()
        layer.zero_grad()

    graphed = pygraph.graph(call)
    for _ in range(8):
        graphed(torch.arange(4.0))
    assert replays(partitions) > 0


def test_a_gradient_that_may_be_written_in_inference_mode_only(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))

    def call(x: torch.Tensor) -> None:
        (p * x).sum().backward()  # type: ignore[no-untyped-call]

    graphed = pygraph.graph(call)
    for _ in range(8):
        graphed(torch.arange(4.0))
    with torch.inference_mode():
        p.grad = torch.ones(4)
    for function in (call, graphed):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            function(torch.arange(4.0))
