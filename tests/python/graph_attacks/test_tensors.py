"""Layouts, hooks and attributes of tensors."""

from __future__ import annotations

from typing import Any

import torch

import pygraph

from .attacked import Plain, X, assert_follows, open_to_this


def test_strides_of_a_parameter(partitions: Any) -> None:
    p = torch.arange(16.0).reshape(4, 4)

    def change() -> None:
        p.data = p.data.t()

    assert_follows(partitions, lambda x: x @ p, change)


def test_offset_of_a_parameter(partitions: Any) -> None:
    flat = torch.arange(8.0)
    p = torch.nn.Parameter(flat[:4])

    def change() -> None:
        p.data = flat[4:]

    assert_follows(partitions, torch.no_grad()(lambda x: x + p), change)


def test_transposed_in_place(partitions: Any) -> None:
    p = torch.arange(16.0).reshape(4, 4)
    assert_follows(partitions, lambda x: x @ p, lambda: p.t_())


def test_attribute_of_a_tensor(partitions: Any) -> None:
    p = torch.arange(4.0)
    p.scale = 2.0
    assert_follows(partitions, lambda x: x + p * p.scale, lambda: setattr(p, "scale", 3.0))


def test_hook_of_a_parameter(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))

    def f(x: Any) -> Any:
        (g,) = torch.autograd.grad((x * p).sum(), p)
        return g

    def change() -> None:
        p.register_hook(lambda g: g * 2)

    assert_follows(partitions, f, change)


def test_what_a_hook_of_a_parameter_reads(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    o = Plain(scale=2.0)
    p.register_hook(lambda g: g * o.scale)
    f = lambda x: torch.autograd.grad((x * p).sum(), p)[0]  # noqa: E731
    assert_follows(partitions, f, lambda: setattr(o, "scale", 3.0))


def test_state_that_was_passed_when_observed(partitions: Any) -> None:
    b = torch.zeros(4)

    def f(x: Any) -> Any:
        b.add_(1)
        return x + b

    graphed = pygraph.graph(f)
    graphed(b)
    for i in range(6):
        graphed(X)
        assert torch.equal(b, torch.full((4,), i + 2.0)), f"call {i + 2}: {b}"


def test_requires_grad_toggled(partitions: Any) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        m = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        o = torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)

        def f(x: Any) -> Any:
            m(x).sum().backward()
            o.step()
            o.zero_grad()

        return m, f

    (m, f), (m2, f2) = make(), make()
    graphed = pygraph.graph(f)
    for i in range(40):
        for of in (m, m2):
            of[0].requires_grad_((i // 8) % 2 == 0)
        x = torch.full((4,), float(i % 3))
        graphed(x)
        f2(x)
        for a, b in zip(m.parameters(), m2.parameters(), strict=True):
            assert torch.equal(a, b), f"call {i + 1}"


def test_a_hook_that_counts(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    n = Plain(n=0)

    def hook(q: Any) -> None:
        n.n += 1

    p.register_post_accumulate_grad_hook(hook)

    def f(x: Any) -> Any:
        (x * p).sum().backward()
        p.grad = None

    graphed = pygraph.graph(f)
    for i in range(10):
        graphed(X)
        assert n.n == i + 1, f"call {i + 1}: {n.n}"


@open_to_this
def test_tensors_of_a_model_can_be_swapped(partitions: Any) -> None:
    a, b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    graphed = pygraph.graph(torch.no_grad()(lambda x: a(x)))
    graphed(X)
    torch.utils.swap_tensors(a.weight, b.weight)
    assert torch.equal(graphed(X), a(X))
