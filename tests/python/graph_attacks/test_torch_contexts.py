"""Contexts of PyTorch's that a call is made in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pygraph

from .attacked import X


def test_saved_tensors_hooks(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    n = []

    def f(x: Any) -> Any:
        (x * p).sum().backward()
        p.grad = None
        return x * 2

    g = pygraph.graph(f)
    for _ in range(8):
        g(X)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: n.append(1) or t, lambda t: t):
        g(X)
    assert n


def test_disabled_saved_tensors_hooks(partitions: Any) -> None:
    def f(x: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return x * 2

    g = pygraph.graph(f)
    for _ in range(8):
        g(X)
    with torch.autograd.graph.disable_saved_tensors_hooks("no"):
        with pytest.raises(RuntimeError):
            f(X)
        with pytest.raises(RuntimeError):
            g(X)


def test_forward_ad(partitions: Any) -> None:
    import torch.autograd.forward_ad as fw

    f = lambda x: x * x  # noqa: E731
    g = pygraph.graph(f)
    for _ in range(8):
        g(X)
    with fw.dual_level():
        y = fw.unpack_dual(g(fw.make_dual(X, torch.ones(4)))).tangent
        assert y is not None and torch.equal(y, 2 * X)


def test_jit_trace(partitions: Any) -> None:
    f = lambda x: x * 2  # noqa: E731
    g = pygraph.graph(f)
    for _ in range(8):
        g(X)
    t = torch.jit.trace(g, X, check_trace=False)
    assert torch.equal(t(X + 1), f(X + 1))


def test_make_fx(partitions: Any) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    f = lambda x: x * 2  # noqa: E731
    g = pygraph.graph(f)
    for _ in range(8):
        g(X)
    t = make_fx(lambda x: g(x))(X)
    assert torch.equal(t(X + 1), f(X + 1))


def test_vmap(partitions: Any) -> None:
    f = lambda x: x * 2  # noqa: E731
    g = pygraph.graph(f)
    for _ in range(8):
        g(X)
    assert torch.equal(torch.vmap(g)(torch.ones(3, 4)), torch.ones(3, 4) * 2)


def test_func_grad(partitions: Any) -> None:
    f = lambda x: (x * x).sum()  # noqa: E731
    g = pygraph.graph(f)
    for _ in range(8):
        g(X)
    assert torch.equal(torch.func.grad(g)(X), 2 * X)


def test_symbolic_trace(partitions: Any) -> None:
    f = lambda x: x * 2  # noqa: E731
    g = pygraph.graph(f)
    for _ in range(8):
        g(X)

    class M(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return g(x) + 1

    m = torch.fx.symbolic_trace(M())
    assert torch.equal(m(X + 1), f(X + 1) + 1)


def test_default_device(partitions: Any) -> None:
    f = lambda x: x * torch.ones(4).device.type.count("e")  # noqa: E731
    g = pygraph.graph(f)
    for _ in range(8):
        g(X)
    with torch.device("meta"):
        assert torch.equal(g(X), f(X))
