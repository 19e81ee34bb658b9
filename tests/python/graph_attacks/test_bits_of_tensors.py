"""What of a tensor can change without another tensor, and without another layout."""

from __future__ import annotations

from typing import Any

import torch

import pygraph

from .attacked import X, assert_follows, replays


def test_conjugate_bit(partitions: Any) -> None:
    c = torch.randn(4, dtype=torch.complex64)

    def change() -> None:
        c.data = c.data.conj()

    assert_follows(partitions, lambda x: x + c.imag, change)


def test_negative_bit(partitions: Any) -> None:
    c = torch.randn(4)

    def change() -> None:
        c.data = torch._neg_view(c.data)

    assert_follows(partitions, lambda x: x + c, change)


def test_first_attribute_of_a_tensor(partitions: Any) -> None:
    c = torch.ones(4)
    f = lambda x: x * getattr(c, "scale", 1.0)  # noqa: E731
    assert_follows(partitions, f, lambda: setattr(c, "scale", 3.0))


def test_other_attributes_of_a_tensor(partitions: Any) -> None:
    c = torch.ones(4)
    vars(c)["scale"] = 2.0

    def change() -> None:
        c.__dict__ = {"scale": 3.0}

    assert_follows(partitions, lambda x: x * c.scale, change)  # type: ignore[attr-defined]


def test_first_attribute_of_a_parameter_that_the_call_writes(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))

    @torch.no_grad()
    def f(x: torch.Tensor) -> torch.Tensor:
        p.mul_(getattr(p, "decay", 1.0))
        return x * p

    graphed = pygraph.graph(f)
    for _ in range(8):
        graphed(X)
    p.decay = 2.0  # type: ignore[attr-defined]
    assert torch.equal(graphed(X), 2 * X), f"{replays(partitions)} replays"


class _Scaled(torch.Tensor):
    def by(self) -> float:
        return 2.0


class _More(torch.Tensor):
    def by(self) -> float:
        return 3.0


def test_class_of_a_tensor(partitions: Any) -> None:
    c: Any = torch.ones(4).as_subclass(_Scaled)  # type: ignore[no-untyped-call]
    f = lambda x: x + c.as_subclass(torch.Tensor) * c.by()  # noqa: E731
    assert_follows(partitions, f, lambda: setattr(c, "__class__", _More))


def test_class_of_a_parameter(partitions: Any) -> None:
    class Special(torch.nn.Parameter):
        pass

    c = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    f = lambda x: x + c * (2.0 if type(c) is Special else 1.0)  # noqa: E731
    assert_follows(partitions, f, lambda: setattr(c, "__class__", Special))
