"""Names that refer to another object, or to one that cannot be looked into."""

from __future__ import annotations

from typing import Any

import torch

import pygraph

from .attacked import Plain, assert_follows, replays, served


def test_world_itself(partitions: Any) -> None:
    import torch.nn.functional as F

    def make() -> Any:
        torch.manual_seed(0)
        m = torch.nn.Sequential(
            torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.ReLU(), torch.nn.Linear(5, 3)
        )
        o = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)

        def step(x: Any, y: Any) -> Any:
            loss = F.cross_entropy(m(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            o.step()
            o.zero_grad()
            return loss

        return m, step

    (m, s), (m2, s2) = make(), make()
    g = pygraph.graph(s)
    for _i in range(12):
        x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
        assert torch.equal(g(x, y), s2(x, y))
        for a, b in zip(m.state_dict().values(), m2.state_dict().values(), strict=False):
            assert torch.equal(a, b)
    assert replays(partitions) >= 5


def test_control(partitions: Any) -> None:
    o = Plain(scale=2.0)
    assert_follows(partitions, lambda x: x * o.scale, lambda: setattr(o, "scale", 3.0))
    assert replays(partitions) > 3


def test_an_alias_that_points_to_another_object(partitions: Any) -> None:
    a, b = Plain(scale=2.0), Plain(scale=3.0)
    o = Plain(active=a, a=a, b=b)
    assert_follows(partitions, lambda x: x * o.active.scale, lambda: setattr(o, "active", b))


def test_an_alias_of_modules(partitions: Any) -> None:
    class M(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.active = None
            self.experts = torch.nn.ModuleList([torch.nn.Dropout(0.5), torch.nn.Identity()])
            self.__dict__["active"] = self.experts[1].eval()

        def forward(self, x: Any) -> Any:
            return x + 1 if isinstance(self.active, torch.nn.Identity) else x * 2

    a, b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    o = Plain(active=a, a=a, b=b)
    f = torch.no_grad()(lambda x: o.active(x))
    assert_follows(partitions, f, lambda: setattr(o, "active", b))


def test_two_closures_with_a_variable_of_the_same_name_other_order(partitions: Any) -> None:
    def make(k: float) -> Any:
        def get() -> float:
            return k

        def put(value: float) -> None:
            nonlocal k
            k = value

        return get, put

    (f, _), (g, set_g) = make(2.0), make(3.0)
    pair = [f, g]
    got, expected = served(lambda x: x * pair[0]() + pair[1](), lambda: set_g(5.0))
    assert torch.equal(got, expected)


def test_fraction(partitions: Any) -> None:
    from fractions import Fraction

    o = Plain(scale=Fraction(1, 2))
    assert_follows(
        partitions, lambda x: x * float(o.scale), lambda: setattr(o, "scale", Fraction(1, 3))
    )


def test_method_descriptor(partitions: Any) -> None:
    o = Plain(act=torch.Tensor.sin)
    assert_follows(partitions, lambda x: o.act(x), lambda: setattr(o, "act", torch.Tensor.cos))


def test_itemgetter(partitions: Any) -> None:
    import operator

    o = Plain(pick=operator.itemgetter(1))
    assert_follows(
        partitions,
        lambda x: x * o.pick((1.0, 2.0, 3.0)),
        lambda: setattr(o, "pick", operator.itemgetter(2)),
    )


def test_np_dtype(partitions: Any) -> None:
    import numpy as np

    o = Plain(f=np.sin)
    assert_follows(partitions, lambda x: x * float(o.f(1.0)), lambda: setattr(o, "f", np.cos))


def test_weakref(partitions: Any) -> None:
    import weakref

    o = Plain(scale=2.0)
    h = Plain(r=weakref.ref(o))
    f = lambda x: x * h.r().scale  # noqa: E731
    assert_follows(partitions, f, lambda: setattr(o, "scale", 3.0))
