"""Objects in the place of others that are gone, and what containers without places hold."""

from __future__ import annotations

import contextvars
import threading
import weakref
from typing import Any

import torch

import pygraph

from .attacked import Plain, X, assert_follows


def test_tuple_in_slot(partitions: Any) -> None:
    class S:
        __slots__ = ("t",)

    s = S()
    s.t = tuple([2.0])

    def change() -> Any:
        a = id(s.t)
        s.t = None
        keep = []
        for _ in range(1000):
            s.t = tuple([float("3")])
            if id(s.t) == a:
                return
            keep.append(s.t)

    assert_follows(partitions, lambda x: x * s.t[0], change)


def test_tuple_in_set(partitions: Any) -> None:
    o = Plain(s={tuple([2.0])})

    def change() -> Any:
        a = id(next(iter(o.s)))
        o.s.clear()
        keep = []
        for _ in range(1000):
            t = tuple([float("3")])
            if id(t) == a:
                break
            keep.append(t)
        o.s.add(t)

    assert_follows(partitions, lambda x: x * next(iter(o.s))[0], change)


def test_object_in_contextvar(partitions: Any) -> None:

    v = contextvars.ContextVar("v")
    p = Plain(scale=2.0)
    v.set(p)
    assert_follows(partitions, lambda x: x * v.get().scale, lambda: setattr(p, "scale", 3.0))


def test_object_in_thread_local(partitions: Any) -> None:
    loc = threading.local()
    p = Plain(scale=2.0)
    loc.p = p
    assert_follows(partitions, lambda x: x * loc.p.scale, lambda: setattr(p, "scale", 3.0))


def test_object_in_set(partitions: Any) -> None:
    p = Plain(scale=2.0)
    s = {p}
    assert_follows(partitions, lambda x: x * next(iter(s)).scale, lambda: setattr(p, "scale", 3.0))


def test_frozenset_of_objects(partitions: Any) -> None:
    p = Plain(scale=2.0)
    s = frozenset([(p,)])
    assert_follows(partitions, lambda x: x * next(iter(s))[0].scale, lambda: setattr(p, "scale", 3.0))


def test_weak_set(partitions: Any) -> None:
    p = Plain(scale=2.0)
    w = weakref.WeakSet([p])
    assert_follows(partitions, lambda x: x * next(iter(w)).scale, lambda: setattr(p, "scale", 3.0))


def test_dict_views(partitions: Any) -> None:
    d = {"a": 2.0}
    v = d.values()
    assert_follows(partitions, lambda x: x * sum(v), lambda: d.update(a=3.0))


def test_slice_of_object(partitions: Any) -> None:
    p = Plain(scale=2.0)
    o = Plain(s=slice(p, None))
    assert_follows(partitions, lambda x: x * o.s.start.scale, lambda: setattr(p, "scale", 3.0))


def test_slot_float_reused(partitions: Any) -> None:
    class C:
        __slots__ = ("a",)

    c = C()
    c.a = float("2")

    def change() -> Any:
        c.a = None
        c.a = float("3")

    assert_follows(partitions, lambda x: x * c.a, change)


def test_slot_deleted(partitions: Any) -> None:
    class C:
        __slots__ = ("a",)

    c = C()
    c.a = None
    assert_follows(partitions, lambda x: x * (2 if hasattr(c, "a") else 3), lambda: delattr(c, "a"))


def test_float_attr_of_graphed(partitions: Any) -> None:
    def f(x: Any) -> Any:
        return x * step.scale

    step = pygraph.graph(f)
    step.scale = float("2")
    for _ in range(8):
        step(X)
    a = id(step.scale)
    step.scale = None
    keep = []
    for _ in range(1000):
        step.scale = float("3")
        if id(step.scale) == a:
            break
        keep.append(step.scale)
    assert torch.equal(step(X), X * 3)


def test_dict_attr_of_graphed(partitions: Any) -> None:
    def f(x: Any) -> Any:
        return x * step.config["scale"]

    step = pygraph.graph(f)
    step.config = {"scale": 2.0}
    for _ in range(8):
        step(X)
    step.config["scale"] = 3.0
    assert torch.equal(step(X), X * 3)


def test_object_dies_id_reused_as_argument(partitions: Any) -> None:
    class C:
        __slots__ = ("s",)

    f = lambda x, c: x * c.s  # noqa: E731
    g = pygraph.graph(f)
    for i in range(60):
        c = C()
        c.s = float(i % 3)
        got = g(X, c)
        assert torch.equal(got, X * float(i % 3)), i
        del c
