"""Results with properties of their own, and modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pygraph

from .attacked import X, assert_follows, open_to_this


def test_a_result_that_is_a_leaf(partitions: Any) -> None:
    graphed = pygraph.graph(lambda x: (x * 2).requires_grad_())
    for i in range(8):
        assert graphed(X).requires_grad, f"call {i + 1}"


def test_learning_rate_that_is_returned(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    o = torch.optim.AdamW([p], lr=0.1, fused=True)

    def f(x: Any) -> Any:
        (x * p).sum().backward()
        o.step()
        o.zero_grad()
        return o.param_groups[0]["lr"]

    graphed = pygraph.graph(f)
    for i in range(2):
        assert type(graphed(X)) is float, f"call {i + 1}"
    with pytest.raises(RuntimeError, match="another structure"):  # which a partition makes a reason
        for _ in range(3):
            graphed(X)


def test_retain_grad_and_double_backward(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(3))

    def f(x: Any) -> Any:
        y = (p * x).pow(3).sum()
        (g,) = torch.autograd.grad(y, p, create_graph=True)
        g.pow(2).sum().backward()
        out = p.grad.clone()
        p.grad = None
        return out, y

    graphed = pygraph.graph(f)
    for i in range(8):
        x = torch.full((3,), float(i))
        assert torch.equal(graphed(x)[0], f(x)[0])


def test_anomalies_that_are_looked_for(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))

    def f(x: Any) -> Any:
        y = torch.where(x == 0, x * p / x, x * p)
        (g,) = torch.autograd.grad(y.sum(), p)
        return g

    graphed = pygraph.graph(f)
    for _ in range(8):
        graphed(X + 1)
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError):
        graphed(X)


def test_cuda_like_default_device_and_dtype(partitions: Any) -> None:
    try:
        assert_follows(
            partitions, lambda x: x + torch.ones(4), lambda: torch.set_default_dtype(torch.float64)
        )
    finally:
        torch.set_default_dtype(torch.float32)


@open_to_this
def test_inference_results(partitions: Any) -> None:
    def f(x: Any) -> Any:
        with torch.inference_mode():
            return x * 2

    graphed = pygraph.graph(f)
    assert [graphed(X).is_inference() for _ in range(8)] == [True] * 8
