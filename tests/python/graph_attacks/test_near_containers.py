"""Containers that are nearly equal to those of another call."""

from __future__ import annotations

import collections
import math
from typing import Any, NamedTuple

import torch

import pygraph

from .attacked import X, alternate, replays


def test_dict_keys_bool_int(partitions: Any) -> None:
    alternate(lambda x, d: x * 2 if next(iter(d)) is True else x * 3, [(X, {1: 1}), (X, {True: 1})])


def test_dict_keys_float_int(partitions: Any) -> None:
    numbers = torch.arange(4)
    alternate(lambda x, d: x * next(iter(d)), [(numbers, {2: 1}), (numbers, {2.0: 1})])


def test_dict_keys_zero(partitions: Any) -> None:

    alternate(lambda x, d: x * math.copysign(1.0, next(iter(d))), [(X, {0.0: 1}), (X, {-0.0: 1})])


def test_dict_order(partitions: Any) -> None:
    alternate(
        lambda x, d: x * next(iter(d.values())) + list(d.values())[1],
        [(X, {"a": X + 1, "b": X}), (X, {"b": X, "a": X + 1})],
    )


def test_ordered_dict_order(partitions: Any) -> None:
    O = collections.OrderedDict  # noqa: E741
    alternate(
        lambda x, d: x * next(iter(d.values())) + list(d.values())[1],
        [(X, O(a=X + 1, b=X)), (X, O(b=X, a=X + 1))],
    )


def test_defaultdict_missing_key2(partitions: Any) -> None:
    f = lambda x, d: x + d["a"]  # noqa: E731
    g = pygraph.graph(f)
    for i in range(10):
        d = collections.defaultdict(int)
        g(X, d)
        assert "a" in d, i


class P(NamedTuple):
    a: Any
    b: Any


class Q(NamedTuple):
    a: Any
    b: Any


def test_named_tuples(partitions: Any) -> None:
    alternate(
        lambda x, p: x * 2 if type(p) is P else x * 3 if type(p) is Q else x * 4,
        [(X, P(X, 1)), (X, Q(X, 1)), (X, (X, 1)), (X, [X, 1])],
    )


def test_empty_containers(partitions: Any) -> None:
    alternate(
        lambda x, p: (
            x
            * {"tuple": 2, "list": 3, "dict": 4, "set": 5, "NoneType": 6, "deque": 7, "OrderedDict": 8}[
                type(p).__name__
            ]
        ),
        [(X, v) for v in ((), [], {}, None, collections.deque(), collections.OrderedDict())],
    )


def test_deque_maxlen(partitions: Any) -> None:
    D = collections.deque
    alternate(lambda x, d: x * (d.maxlen or 1), [(X, D([X], 2)), (X, D([X], 3)), (X, D([X]))])


def test_300_arguments(partitions: Any) -> None:
    def f(*xs: Any) -> Any:
        return sum(x * (i + 1) for i, x in enumerate(xs))

    g = pygraph.graph(f)
    for i in range(12):
        xs = [X + j + i for j in range(300)]
        assert torch.equal(g(*xs), f(*xs)), i
    assert replays(partitions) > 3


def test_300_kwargs(partitions: Any) -> None:
    def f(**xs: Any) -> Any:
        return sum(x * (i + 1) for i, x in enumerate(xs.values()))

    g = pygraph.graph(f)
    for i in range(12):
        xs = {f"a{j}": X + j + i for j in range(300)}
        assert torch.equal(g(**xs), f(**xs)), i
    assert replays(partitions) > 3


def test_recursive_list(partitions: Any) -> None:
    l = [X]  # noqa: E741
    l.append(l)
    f = lambda l: l[1][0] * 2  # noqa: E731, E741
    g = pygraph.graph(f)
    for _ in range(6):
        assert torch.equal(g(l), X * 2)


def test_deep_list(partitions: Any) -> None:
    l = X  # noqa: E741
    for _ in range(600):
        l = [l]  # noqa: E741

    def f(l: Any) -> Any:  # noqa: E741
        while type(l) is list:
            l = l[0]  # noqa: E741
        return l * 2

    g = pygraph.graph(f)
    for _ in range(6):
        assert torch.equal(g(l), X * 2)
