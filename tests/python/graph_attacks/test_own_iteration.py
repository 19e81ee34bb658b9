"""Containers of the program's own classes, whose ``__iter__`` and ``items`` tell something else than
what they hold, or do something when they are asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

import pygraph

from .attacked import Plain, X, assert_replays_follow, replays


class _Doubling(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (2 * x for x in list.__iter__(self))


class _Batched(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (self[i : i + 2] for i in range(0, len(self), 2))


class _First(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(self[:1])


class _Hidden(dict[str, Any]):
    def items(self) -> Any:
        return [(key, value) for key, value in dict.items(self) if not key.startswith("_")]

    def __iter__(self) -> Iterator[str]:
        return (key for key in dict.__iter__(self) if not key.startswith("_"))


class _Built(dict[str, Any]):
    def items(self) -> Any:
        return [(key, value()) for key, value in dict.items(self)]


_DATA = [
    *(_Doubling([1.0, 2.0]), _Batched([1.0, 2.0, 3.0]), _First([1.0, 2.0])),
    *(_Hidden(a=1.0, _b=2.0), _Built(a=float)),
]


@pytest.mark.parametrize("data", _DATA, ids=lambda of: type(of).__name__)
def test_contents_stay(partitions: Any, data: Any) -> None:
    kind: Any = list if isinstance(data, list) else dict
    held, before = Plain(data=data, s=2.0), kind.__repr__(data)
    graphed = pygraph.graph(lambda x: x * held.s)
    for _ in range(12):
        assert torch.equal(graphed(X), X * 2)
    assert replays(partitions)
    assert kind.__repr__(data) == before


@pytest.mark.parametrize("data", _DATA, ids=lambda of: type(of).__name__)
def test_contents_are_put_back(partitions: Any, data: Any) -> None:
    """Those that a rehearsal has changed."""
    kind: Any = list if isinstance(data, list) else dict
    held, before = Plain(data=data), kind.__repr__(data)

    def call(x: torch.Tensor) -> torch.Tensor:
        if kind is list:
            held.data.append(7.0)
            list.pop(held.data)
        else:
            dict.__setitem__(held.data, "_c", 7.0)
            dict.__delitem__(held.data, "_c")
        return x * 2

    graphed = pygraph.graph(call)
    for _ in range(12):
        assert torch.equal(graphed(X), X * 2)
    assert kind.__repr__(data) == before


class _Epochs(list[Any]):
    epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        return super().__iter__()


def test_iteration_has_no_effect(partitions: Any) -> None:
    held = Plain(data=_Epochs([1.0]), s=2.0)
    graphed = pygraph.graph(lambda x: x * held.s)
    for _ in range(12):
        graphed(X)
    assert held.data.epoch == 0
    assert replays(partitions)


class _Endless(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(itertools.cycle(list.__iter__(self)), 1_000_000)


def test_endless_iteration(partitions: Any) -> None:
    held = Plain(data=_Endless([1.0]), s=2.0)
    graphed = pygraph.graph(lambda x: x * held.s)
    for _ in range(12):
        assert torch.equal(graphed(X), X * 2)
    assert replays(partitions)


class _Pair(NamedTuple):
    a: float
    b: float


class _Apart(_Pair):
    def __iter__(self) -> Iterator[float]:
        return iter((self.a,))


def test_a_hidden_field(partitions: Any) -> None:
    held = Plain(v=_Apart(1.0, 2.0))
    change = lambda: setattr(held, "v", _Apart(1.0, 3.0))  # noqa: E731
    assert_replays_follow(partitions, lambda x: x * held.v.b, change)
