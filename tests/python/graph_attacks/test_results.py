"""Results with properties of their own, and modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pygraph

from .attacked import X, assert_follows, replays


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
    for i in range(6):
        assert type(graphed(X)) is float, f"call {i + 1}"
    assert replays(partitions) == 0
    assert "another structure" in partitions.all[0].entries[b""].reason


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


def test_inference_results(partitions: Any) -> None:
    def f(x: Any) -> Any:
        with torch.inference_mode():
            return x * 2

    graphed = pygraph.graph(f)
    assert [graphed(X).is_inference() for _ in range(8)] == [True] * 8
    assert replays(partitions) > 0


def test_some_inference_results(partitions: Any) -> None:
    def f(x: Any) -> Any:
        with torch.inference_mode():
            made = x * 2
            parts = made[1:], made, x, x[1:]
        return (*parts, x + 1)

    graphed, expected = pygraph.graph(f), f(X)
    for _ in range(8):
        found = graphed(X)
        assert [t.is_inference() for t in found] == [t.is_inference() for t in expected]
        assert all(map(torch.equal, found, expected))
        assert found[0].data_ptr() == found[1][1:].data_ptr()
    assert replays(partitions) > 0


def test_results_that_are_not_of_the_calls_inference_mode(partitions: Any) -> None:
    def f(x: Any) -> Any:
        with torch.inference_mode(False):
            made = x + 1
        return made, x * 2

    graphed = pygraph.graph(f)
    with torch.inference_mode():
        found = [graphed(X) for _ in range(8)]
    assert [[t.is_inference() for t in pair] for pair in found] == [[False, True]] * 8
    assert replays(partitions) > 0


def test_a_layer_goes_on_from_inference_results(partitions: Any) -> None:
    """Autograd refuses to save them for the backward."""
    weight = torch.ones(4, requires_grad=True)

    @torch.inference_mode()
    def f(x: Any) -> Any:
        return x * 2

    graphed = pygraph.graph(f)
    for _ in range(8):
        with pytest.raises(RuntimeError, match="Inference tensors"):
            graphed(X) * weight


def test_an_argument_of_inference_mode_is_another_one(partitions: Any) -> None:
    with torch.inference_mode():
        other = X.clone()
    view, asked = pygraph.graph(lambda x: x[1:]), pygraph.graph(lambda x: x + x.is_inference())
    for _ in range(8):
        assert torch.equal(asked(X), X) and not view(X).is_inference()
    assert replays(partitions) > 0
    assert torch.equal(asked(other), X + 1)
    assert [view(other).is_inference() for _ in range(8)] == [True] * 8
