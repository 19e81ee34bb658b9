"""Arguments that are nearly equal to those of another call."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch

import pygraph

from .attacked import X, alternate, assert_follows, replays


class K(int):
    pass


def k(v: Any, s: Any) -> Any:
    a = K(v)
    a.scale = s
    return a


def test_int_subclass_with_attributes(partitions: Any) -> None:
    alternate(lambda x, n: x * n.scale, [(X, k(2, 2.0)), (X, k(2, 3.0))])


class EqInt(int):
    def __eq__(self, other: Any) -> Any:
        return isinstance(other, EqInt)

    def __hash__(self) -> Any:
        return 1


def test_int_subclass_equal_all(partitions: Any) -> None:
    alternate(lambda x, n: x * int(n), [(X, EqInt(2)), (X, EqInt(3))])


class ReprFloat(float):
    def __repr__(self) -> Any:
        return "F"


def test_float_subclass_repr(partitions: Any) -> None:
    alternate(lambda x, n: x * n, [(X, ReprFloat(2)), (X, ReprFloat(3))])


class RaisingFloat(float):
    def __repr__(self) -> Any:
        raise RuntimeError("no repr")


def test_float_subclass_repr_raises(partitions: Any) -> None:
    g = pygraph.graph(lambda x, n: x * n)
    for _ in range(6):
        assert torch.equal(g(X, RaisingFloat(2)), X * 2)


class RaisingHash(str):
    def __hash__(self) -> Any:
        raise ValueError("no hash")


def test_str_subclass_hash_raises(partitions: Any) -> None:
    g = pygraph.graph(lambda x, n: x * len(n))
    for _ in range(6):
        assert torch.equal(g(X, RaisingHash("ab")), X * 2)


class RaisingEq(str):
    def __eq__(self, other: Any) -> Any:
        raise ValueError("no eq")

    __hash__ = str.__hash__


def test_str_subclass_eq_raises(partitions: Any) -> None:
    g = pygraph.graph(lambda x, n: x * len(n))
    for _ in range(6):
        assert torch.equal(g(X, RaisingEq("ab")), X * 2)


def test_intenum_argument_attribute(partitions: Any) -> None:
    class E(enum.IntEnum):
        A = 1

    E.A.scale = 2.0
    assert_follows(partitions, lambda x, e: x * e.scale, lambda: setattr(E.A, "scale", 3.0), X, E.A)


def test_enum_argument_attribute(partitions: Any) -> None:
    class E(enum.Enum):
        A = 1

    E.A.scale = 2.0
    assert_follows(partitions, lambda x, e: x * e.scale, lambda: setattr(E.A, "scale", 3.0), X, E.A)


def test_values(partitions: Any) -> None:
    numbers, nan = torch.arange(4), float("nan")
    vals = [True, 1, 1.0, 0, False, 0.0, -0.0, nan, -nan, 1j, complex(1, 0), complex(1, -0.0)]

    def f(x: Any, v: Any) -> Any:
        return (x * v, x + 7)[isinstance(v, bool)].nan_to_num(5)

    g = pygraph.graph(f)
    for i in range(200):
        v = vals[(i * 7) % len(vals)]
        got, want = g(numbers, v), f(numbers, v)
        assert got.dtype == want.dtype and torch.equal(got, want), (i, v)
        if not got.is_complex():
            assert torch.equal(torch.signbit(got), torch.signbit(want)), (i, v)


def test_args_vs_kwargs(partitions: Any) -> None:
    def f(*a: Any, **k: Any) -> Any:
        return sum(a) * 2 + sum(k.values()) * 3

    g = pygraph.graph(f)
    for i in range(40):
        if i % 2:
            assert torch.equal(g(X, y=X + 1), f(X, y=X + 1))
        else:
            assert torch.equal(g(X, X + 1), f(X, X + 1))


def test_torch_size_argument(partitions: Any) -> None:
    g = pygraph.graph(lambda x, s: x.reshape(s) * 2)
    for _ in range(20):
        assert torch.equal(g(X, torch.Size([2, 2])), X.reshape(2, 2) * 2)
    assert replays(partitions) > 3


@dataclasses.dataclass
class Batch:
    x: Any
    n: float


def test_dataclass(partitions: Any) -> None:
    f = lambda b: b.x * b.n  # noqa: E731
    g = pygraph.graph(f)
    b = Batch(X, 2.0)
    for _ in range(8):
        assert torch.equal(g(b), X * 2)
    b.n = 3.0
    assert torch.equal(g(b), X * 3)
    b.x = X + 1
    assert torch.equal(g(b), (X + 1) * 3)
    for i in range(30):
        b = Batch(X + i, float(i % 3))
        assert torch.equal(g(b), f(b))


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    n: float


def test_frozen_slots_dataclass(partitions: Any) -> None:
    f = lambda b: b.x * b.n  # noqa: E731
    g = pygraph.graph(f)
    for i in range(60):
        b = Frozen(X + i % 5, float(i % 3))
        assert torch.equal(g(b), f(b)), i


def test_same_tensor_twice(partitions: Any) -> None:
    def f(x: Any, y: Any) -> Any:
        x = x * 1
        return x * 2 + y if x is y else x * 2 + y * 3

    a, b = X.clone(), X.clone() + 1
    alternate(f, [(a, a), (a, b), (b, a), (b, b)])


def test_overlap_written(partitions: Any) -> None:
    def f(x: Any, y: Any) -> Any:
        x.add_(1)
        return x * y

    g = pygraph.graph(f)
    for i in range(20):
        base, ref = torch.arange(10.0), torch.arange(10.0)
        a = (base[:4], base[2:6]) if i % 3 == 0 else (base[:4], torch.ones(4))
        b = (ref[:4], ref[2:6]) if i % 3 == 0 else (ref[:4], torch.ones(4))
        assert torch.equal(g(*a), f(*b)) and torch.equal(base, ref), i


class Lazy:
    @property
    def __class__(self) -> Any:
        raise RuntimeError("working outside of context")


def test_lazy_proxy(partitions: Any) -> None:
    l = Lazy()  # noqa: E741
    g = pygraph.graph(lambda x, l: x * 2)  # noqa: E741
    for _ in range(6):
        assert torch.equal(g(X, l), X * 2)


def test_lazy_proxy_closure(partitions: Any) -> None:
    l = Lazy()  # noqa: E741
    g = pygraph.graph(lambda x: x * (2 if type(l) is Lazy else 3))
    for _ in range(6):
        assert torch.equal(g(X), X * 2)
