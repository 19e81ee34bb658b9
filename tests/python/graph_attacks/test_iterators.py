"""Iterators, and the order of containers."""

from __future__ import annotations

from typing import Any

import torch

import pygraph

from .attacked import X, assert_follows, replays


def test_generator_with_the_same_place(partitions: Any) -> None:
    def numbers() -> Any:
        n = 0
        while True:
            n += 1
            yield n

    it = numbers()

    def f(x: Any) -> Any:
        return x * (2 if next(it) > 40 else 1)

    graphed = pygraph.graph(f)
    for i in range(60):
        got = graphed(X)
        assert torch.equal(got, X * (2 if i + 1 > 40 else 1)), (
            f"call {i + 1}, {replays(partitions)} replays"
        )


def test_cycle(partitions: Any) -> None:
    import itertools

    it = itertools.cycle([1.0] * 20 + [2.0])
    f = lambda x: x * next(it)  # noqa: E731
    expected = itertools.cycle([1.0] * 20 + [2.0])
    graphed = pygraph.graph(f)
    for i in range(30):
        got = graphed(X)
        assert torch.equal(got, X * next(expected)), f"call {i + 1}, {replays(partitions)} replays"


def test_enumerate(partitions: Any) -> None:
    it = enumerate([0.0] * 100)
    graphed = pygraph.graph(lambda x: x * (2 if next(it)[0] > 40 else 1))
    for i in range(60):
        assert torch.equal(graphed(X), X * (2 if i > 40 else 1)), f"call {i + 1}"


def test_order_of_a_dict(partitions: Any) -> None:
    d = {"a": 1.0, "b": 2.0}

    def reorder() -> None:
        d["a"] = d.pop("a")

    def f(x: Any) -> Any:
        for k in d.values():
            x = x * k + 1
        return x

    assert_follows(partitions, f, reorder)


def test_order_of_an_ordered_dict(partitions: Any) -> None:
    import collections

    d = collections.OrderedDict(a=1.0, b=2.0)

    def f(x: Any) -> Any:
        for k in d.values():
            x = x * k + 1
        return x

    assert_follows(partitions, f, lambda: d.move_to_end("a"))


def test_two_classes_of_one_name(partitions: Any) -> None:
    def make(k: float) -> Any:
        class Config:
            scale = k

        return Config

    a, b = make(2.0), make(3.0)
    for of in (a, b):
        assert_follows(
            partitions,
            lambda x: x * a.scale + b.scale,
            lambda of=of: setattr(of, "scale", of.scale + 1),
        )


def test_a_dict_with_keys_of_one_repr(partitions: Any) -> None:
    class Key:
        def __repr__(self) -> str:
            return "Key()"

    k, m = Key(), Key()
    d = {k: 1.0, m: 2.0}
    for key in (k, m):
        assert_follows(
            partitions, lambda x: x * d[k] + d[m], lambda key=key: d.__setitem__(key, d[key] + 1)
        )
