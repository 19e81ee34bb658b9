"""Optimizers, checkpoints and gradients."""

from __future__ import annotations

from typing import Any

import torch

import pygraph

from .attacked import X, adamw_step, replays


def test_lr_as_numpy_number(partitions: Any) -> None:
    import numpy as np

    _, o, f = adamw_step()
    graphed = pygraph.graph(f)
    for i in range(20):
        o.param_groups[0]["lr"] = np.float64(0.1 / (i + 1))
        graphed(X)
    assert replays(partitions) > 3, pygraph.stats()


def test_the_lr_that_the_step_computes_with(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    o = torch.optim.AdamW([p], lr=0.1, fused=True)

    def f(x: Any) -> Any:
        (x * p).sum().backward()
        o.step()
        o.zero_grad()
        return x.double() * o.param_groups[0]["lr"]

    graphed = pygraph.graph(f)
    for i in range(20):
        o.param_groups[0]["lr"] = 0.1 / (i + 1)
        assert torch.equal(graphed(X), X.double() * (0.1 / (i + 1))), f"call {i + 1}"


def test_lr_that_becomes_another_groups(partitions: Any) -> None:
    """A new dictionary of a group, as load_state_dict makes: the rate must still be followed."""

    (p, o, f), (p2, o2, f2) = adamw_step(), adamw_step()
    graphed = pygraph.graph(f)
    for i in range(30):
        if i in (8, 16):
            o.load_state_dict(o.state_dict())
            o2.load_state_dict(o2.state_dict())
        o.param_groups[0]["lr"] = o2.param_groups[0]["lr"] = 0.1 / (i + 1)
        graphed(X)
        f2(X)
        assert torch.equal(p, p2), f"call {i + 1}, {replays(partitions)} replays"
    assert replays(partitions) > 3


def test_a_group_that_is_replaced(partitions: Any) -> None:
    (p, o, f), (p2, o2, f2) = adamw_step(), adamw_step()
    graphed = pygraph.graph(f)
    for i in range(20):
        for of in (o, o2):
            if i == 8:
                of.param_groups[0] = dict(of.param_groups[0])
            of.param_groups[0]["lr"] = 0.1 / (i + 1)
        graphed(X)
        f2(X)
        assert torch.equal(p, p2), f"call {i + 1}, {replays(partitions)} replays"


def test_gradients_that_the_program_clears_by_itself(partitions: Any) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        m = torch.nn.Linear(4, 4)

        def f(x: Any) -> Any:
            m(x).sum().backward()

        return m, f

    (m, f), (m2, f2) = make(), make()
    graphed = pygraph.graph(f)
    for i in range(24):
        for of in (m, m2):
            if i % 3 == 0:
                of.zero_grad()
            if i % 5 == 0:
                of.bias.grad = None
        x = torch.full((4,), float(i))
        graphed(x)
        f2(x)
        for a, b in zip(m.parameters(), m2.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad), f"call {i + 1}"


def test_checkpoint_loaded_midway_with_copies(partitions: Any) -> None:
    import copy

    def make() -> Any:
        torch.manual_seed(0)
        m = torch.nn.Linear(4, 4)
        o = torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)
        s = torch.optim.lr_scheduler.ExponentialLR(o, 0.8)

        def f(x: Any) -> Any:
            m(x).sum().backward()
            o.step()
            o.zero_grad()

        return m, o, s, f

    a, b = make(), make()
    graphed = pygraph.graph(a[3])
    saved: list[Any] = []
    for i in range(40):
        for at, (m, o, s, _) in enumerate((a, b)):
            if i == 10:
                saved.append(copy.deepcopy((m.state_dict(), o.state_dict(), s.state_dict())))
            if i in (16, 28):
                for of, state in zip((m, o, s), copy.deepcopy(saved[at]), strict=True):
                    of.load_state_dict(state)
        x = torch.full((4,), float(i % 3))
        graphed(x)
        b[3](x)
        for _, _, s, _ in (a, b):
            s.step()
        for p, q in zip(a[0].parameters(), b[0].parameters(), strict=True):
            assert torch.equal(p, q), f"call {i + 1}"
    assert replays(partitions) > 5


def test_the_state_dict_of_an_optimizer_is_loaded_back(partitions: Any) -> None:
    """As after a check of gradients: the optimizer's state is rolled back by its own state_dict."""

    def make() -> Any:
        torch.manual_seed(0)
        m = torch.nn.Linear(4, 4)
        o = torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)

        def f(x: Any) -> Any:
            m(x).sum().backward()
            o.step()
            o.zero_grad()

        return m, o, f

    a, b = make(), make()
    graphed = pygraph.graph(a[2])
    for i in range(30):
        for _, o, _ in (a, b):
            if i == 10:
                o.load_state_dict(o.state_dict())
            for group in o.param_groups:
                group["lr"] = 0.1 / (i + 1)
        x = torch.full((4,), float(i % 3))
        graphed(x)
        b[2](x)
        for p, q in zip(a[0].parameters(), b[0].parameters(), strict=True):
            assert torch.equal(p, q), f"call {i + 1}, {replays(partitions)}"


def test_old_gradients_that_the_program_keeps(partitions: Any) -> None:
    """Of a module that is not walked, as a compiled one."""

    def make() -> Any:
        torch.manual_seed(0)
        inner = torch.nn.Linear(4, 4)
        module = torch.compile(inner, backend="eager")

        def f(x: Any) -> None:
            module(x).sum().backward()

        return inner, f

    (m, f), (m2, f2) = make(), make()
    graphed = pygraph.graph(f)
    saved = []
    for i in range(16):
        if i == 12:
            saved = [p.grad for p in m.parameters()]
            m.zero_grad()
            m2.zero_grad()
        graphed(X)
        f2(X)
        for p, q in zip(m.parameters(), m2.parameters(), strict=True):
            assert p.grad is not None and torch.equal(p.grad, q.grad), f"call {i + 1}"
    del saved
