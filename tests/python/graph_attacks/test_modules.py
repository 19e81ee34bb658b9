"""Modules that are compiled, scripted, traced or graphed."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

import pygraph

from .attacked import Plain, X, assert_follows, replays


def test_inner_graphed(partitions: Any) -> None:
    o = Plain(scale=2.0)
    inner = pygraph.graph(lambda x: x * o.scale)
    assert_follows(partitions, lambda x: inner(x) + 1, lambda: setattr(o, "scale", 3.0))


def test_compiled_module_mode(partitions: Any) -> None:
    m = torch.compile(torch.nn.Dropout(0.0), backend="eager")
    m.scale = 1

    class M(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2 if self.training else x * 3

    inner = M()
    m = torch.compile(inner, backend="eager")
    assert_follows(partitions, lambda x: m(x), lambda: m.eval())


def test_fx_module_mode(partitions: Any) -> None:
    class M(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = torch.nn.BatchNorm1d(4)

        def forward(self, x: Any) -> Any:
            return self.bn(x)

    m = torch.fx.symbolic_trace(M())
    f = torch.no_grad()(lambda x: m(x))
    assert_follows(partitions, f, lambda: m.eval(), torch.randn(3, 4))


def test_scripted_module_mode(partitions: Any) -> None:
    m = torch.jit.script(torch.nn.Sequential(torch.nn.BatchNorm1d(4)))
    f = torch.no_grad()(lambda x: m(x))
    assert_follows(partitions, f, lambda: m.eval(), torch.randn(3, 4))


@pytest.mark.parametrize("saved", [False, True])
def test_values_of_a_scripted_module(partitions: Any, saved: bool) -> None:
    class Inner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shifts = [1, 2]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.shifts[0]

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = Inner(), 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.scale

    module: Any = torch.jit.script(Outer())
    if saved:
        file = io.BytesIO()
        torch.jit.save(module, file)
        file.seek(0)
        module = torch.jit.load(file)
    assert_follows(partitions, lambda x: module(x), lambda: setattr(module, "scale", 3))
    assert_follows(partitions, lambda x: module(x), lambda: setattr(module.inner, "shifts", [5, 2]))
    assert replays(partitions) > 0


def test_order_of_modules(partitions: Any) -> None:
    m = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(4, 4))

    def reorder() -> None:
        m._modules["0"] = m._modules.pop("0")

    assert_follows(partitions, torch.no_grad()(lambda x: m(x)), reorder)


def test_registered_global_module_hook(partitions: Any) -> None:
    m = torch.nn.ReLU()
    hooks = []

    def change() -> None:
        hooks.append(torch.nn.modules.module.register_module_forward_hook(lambda mod, a, out: out * 2))

    try:
        assert_follows(partitions, lambda x: m(x), change)
    finally:
        for h in hooks:
            h.remove()


def test_a_compiled_module_that_counts(partitions: Any) -> None:
    class M(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n = 0

        def forward(self, x: Any) -> Any:
            self.n += 1
            return x * 2

    inner = M()
    m = torch.compile(inner, backend="eager")
    graphed = pygraph.graph(lambda x: m(x))
    for i in range(8):
        graphed(X)
        assert inner.n == i + 1, f"call {i + 1}: {inner.n}"


def test_a_librarys_method_that_the_program_has_replaced(
    partitions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = torch.nn.Linear(4, 4), []
    own = torch.nn.Linear.forward

    def forward(self: Any, x: Any) -> Any:
        calls.append(0)
        return own(self, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)

    @pygraph.graph
    @torch.no_grad()
    def f(x: Any) -> Any:
        return model(x)

    for _ in range(14):
        f(X)
    assert len(calls) == 14 and replays(partitions) == 0
