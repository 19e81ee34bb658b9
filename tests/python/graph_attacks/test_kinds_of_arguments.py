"""Tensors of unusual kinds that are passed, and what a call does to the tensors that it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph

from .attacked import X, replays


def _fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(torch.ones(4))


def _nested(layout: torch.layout) -> Callable[[], torch.Tensor]:
    return lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


_SPECIAL: dict[str, Callable[[], torch.Tensor]] = {
    "nested": _nested(torch.strided),
    "jagged": _nested(torch.jagged),
    "sparse_coo": lambda: torch.eye(4).to_sparse(),
    "sparse_csr": lambda: torch.eye(4).to_sparse_csr(),
    "sparse_bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "_mkldnn": lambda: torch.ones(4).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "meta": lambda: torch.ones(4, device="meta"),
    "memoryless": lambda: torch._efficientzerotensor(4),
    "functional": lambda: torch._to_functional_tensor(torch.ones(4)),
    "fake": _fake,
    "buffer": lambda: torch.nn.Buffer(torch.ones(4)),
    "uninitialized": lambda: torch.nn.UninitializedParameter(),
}


@pytest.mark.parametrize("is_later", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("kind", _SPECIAL)
def test_a_special_tensor(partitions: Any, kind: str, is_later: bool) -> None:
    """is_later: after calls with a plain tensor, which have a graph."""
    graphed, special, plain = pygraph.graph(lambda x, other: x * 2), _SPECIAL[kind](), torch.ones(4)
    for _ in range(12 if is_later else 0):
        graphed(X, plain)
    for _ in range(12):
        assert torch.equal(graphed(X, special), X * 2)
    assert (replays(partitions) > 0) == is_later
    text = (
        "has a structure" if kind in ("jagged", "fake", "buffer", "uninitialized") else " tensor; make"
    )
    assert any(text in row.reason for row in pygraph.stats())
    made = replays(partitions)
    for _ in range(12):
        graphed(X, plain)
    assert replays(partitions) > made


@pytest.mark.parametrize("of", ["an argument", "its gradient", "a gradient that is kept"])
def test_attributes_that_a_call_gives(partitions: Any, of: str) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    if "kept" in of:
        p.grad = torch.zeros(4)

    def f(x: Any) -> None:
        if "kept" in of:
            assert p.grad is not None
            p.grad.zero_()
        else:
            p.grad = None
        (p * x).sum().backward()
        (x if of == "an argument" else p.grad).is_done = [1]

    graphed = pygraph.graph(f)
    for i in range(16):
        x = X + i
        graphed(x)
        assert p.grad is not None and torch.equal(p.grad, x)
        marked: Any = x if of == "an argument" else p.grad
        assert marked.is_done == [1], f"call {i + 1}"
        marked.is_done = [2]
    assert any("each call changes" in row.reason for row in pygraph.stats())


@pytest.mark.parametrize("change", ["t_", "detach_", "unsqueeze_"])
def test_an_argument_with_a_history_is_changed_in_place(partitions: Any, change: str) -> None:
    weight = torch.arange(6.0).view(2, 3).requires_grad_()

    def f(y: Any) -> Any:
        getattr(y, change)(*([0] if change == "unsqueeze_" else []))
        return y * 2

    graphed, y, other = pygraph.graph(f), weight * 1, weight * 1
    with torch.no_grad():
        for i in range(16):
            got, expected = graphed(y), f(other)
            assert got.shape == expected.shape and torch.equal(got, expected), f"call {i + 1}"
            assert y.requires_grad == other.requires_grad
            if change != "t_":
                y, other = weight * 1, weight * 1


def test_whether_an_argument_is_a_leaf(partitions: Any) -> None:
    weight = torch.ones(4, requires_grad=True)
    computed = weight * 3

    def f(x: Any) -> Any:
        return x.detach() * (2.0 if x.is_leaf else 1.0)

    graphed = pygraph.graph(f)
    with torch.no_grad():
        for _ in range(12):
            graphed(weight)
        for _ in range(2):  # in a recording it would be a leaf, which the comparison shows
            assert torch.equal(graphed(computed), f(computed))
            assert torch.equal(graphed(weight), f(weight))
    assert replays(partitions) > 0
