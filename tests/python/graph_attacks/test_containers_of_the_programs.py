"""Code that a step reaches by the classes of containers and values that are passed to it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

import pygraph

from .attacked import X, replays


class Config:
    scale = 2.0
    count = 0


CONFIG = Config()


@pytest.fixture(autouse=True)
def as_before() -> Any:
    yield
    CONFIG.__dict__.clear()
    for class_ in (Named, Weight, Word):
        class_.weight = 2.0


class Named(NamedTuple):
    x: Any

    def scaled(self) -> Any:
        return self.x * CONFIG.scale

    def weighted(self) -> Any:
        return self.x * self.weight  # type: ignore[attr-defined]

    def counted(self) -> Any:
        CONFIG.count += 1
        return self.x * 2


class Derived(collections.namedtuple("Derived", ["x"])):
    weight = 2.0

    def weighted(self) -> Any:
        return self.x * self.weight


@dataclasses.dataclass
class Data:
    x: Any

    def scaled(self) -> Any:
        return self.x * CONFIG.scale


class Node:
    def __init__(self, x: Any, meta: Any) -> None:
        self.x, self.meta = x, meta


class Weight(float):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(self) * self.weight  # type: ignore[attr-defined]


class Word(str):
    __slots__ = ()

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x * len(self) * self.weight  # type: ignore[attr-defined]


pytree.register_dataclass(Data)
pytree.register_pytree_node(
    Node, lambda node: ([node.x], node.meta), lambda children, meta: Node(*children, meta)
)


def _set(of: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(of, name, value)


def _factory() -> float:
    return CONFIG.scale


_META = Config()
_CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], Callable[[], None]]] = {
    "global": (lambda b: b.scaled(), lambda: (Named(X + 1),), _set(CONFIG, "scale", 3.0)),
    "in a list": (lambda b: b[0].scaled(), lambda: ([Named(X + 1)],), _set(CONFIG, "scale", 3.0)),
    "in a dict": (
        lambda b: b["a"].scaled(),
        lambda: ({"a": Named(X + 1)},),
        _set(CONFIG, "scale", 3.0),
    ),
    "class": (lambda b: b.weighted(), lambda: (Named(X + 1),), _set(Named, "weight", 3.0)),
    "derived": (lambda b: b.weighted(), lambda: (Derived(X + 1),), _set(Derived, "weight", 3.0)),
    "dataclass": (lambda b: b.scaled(), lambda: (Data(X + 1),), _set(CONFIG, "scale", 3.0)),
    "context": (lambda b: b.x * b.meta.scale, lambda: (Node(X + 1, _META),), _set(_META, "scale", 3.0)),
    "number": (lambda w, x: w.of(x), lambda: (Weight(2), X + 1), _set(Weight, "weight", 3.0)),
    "word": (lambda w, x: w.of(x), lambda: (Word("ab"), X + 1), _set(Word, "weight", 3.0)),
    "factory": (
        lambda d: d["x"] * d.default_factory(),
        lambda: (collections.defaultdict(_factory, x=X + 1),),
        _set(CONFIG, "scale", 3.0),
    ),
}


@pytest.mark.parametrize("case", _CASES)
def test_what_a_class_of_an_argument_reads(partitions: Any, case: str) -> None:
    function, arguments, change = _CASES[case]
    graphed = pygraph.graph(function)
    for _ in range(12):
        assert torch.equal(graphed(*arguments()), function(*arguments()))
    assert replays(partitions) > 0, pygraph.stats()
    change()
    assert torch.equal(graphed(*arguments()), function(*arguments()))


def test_what_a_method_of_an_argument_counts(partitions: Any) -> None:
    graphed = pygraph.graph(lambda batch: batch.counted())
    for i in range(12):
        graphed(Named(X + 1))
        assert CONFIG.count == i + 1
