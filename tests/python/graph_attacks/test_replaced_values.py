"""Another object in the place of one that is nearly equal, and contents that objects keep in C."""

from __future__ import annotations

import array
import cmath
import collections
import concurrent.futures
import contextvars
import copy
import datetime
import decimal
import functools
import math
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import pygraph

from .attacked import Plain, X, assert_replays_follow, replays


class _Duration(datetime.timedelta):
    pass


class _Complex(complex):
    pass


def _two() -> Iterator[float]:
    while True:
        yield 2.0


def _three() -> Iterator[float]:
    while True:
        yield 3.0


def _begun(generator: Iterator[float]) -> Iterator[float]:
    next(generator)
    return generator


_REPLACED: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "decimal": (decimal.Decimal("2"), decimal.Decimal("3"), float),
    "limit of a deque": (
        *(collections.deque([1.0], maxlen=4), collections.deque([1.0], maxlen=2)),
        lambda of: of.maxlen,
    ),
    "duration": (_Duration(seconds=2), _Duration(seconds=3), lambda of: of.total_seconds()),
    "complex": (_Complex(2), _Complex(3), lambda of: of.real),
    "generator": (_begun(_two()), _begun(_three()), next),
    "type of an array": (array.array("b", [-1]), array.array("B", [255]), lambda of: of[0]),
    "format of a view": (memoryview(b"\xff").cast("b"), memoryview(b"\xff"), lambda of: of[0]),
    "equal ranges": (range(0, 3, 2), range(0, 4, 2), lambda of: of.stop),
    "order of dimensions": (
        *(np.ones((2, 3)), np.asfortranarray(np.ones((2, 3)))),
        lambda of: of.strides[0],
    ),
    "builtin": (math.sqrt, cmath.sqrt, lambda of: 2.0 if isinstance(of(4), float) else 3.0),
    "builtins of other modules": (
        *(math.pow, operator.pow),
        lambda of: 2.0 if isinstance(of(2, 2), float) else 3.0,
    ),
    "iterator": (iter([2.0]), iter([3.0]), lambda of: next(copy.copy(of))),
}


@pytest.mark.parametrize("kind", _REPLACED)
def test_replaced(partitions: Any, kind: str) -> None:
    old, new, read = _REPLACED[kind]
    held = Plain(v=old)
    assert_replays_follow(partitions, lambda x: x * read(held.v), lambda: setattr(held, "v", new))


class _Tagged(np.ndarray):  # type: ignore[type-arg]
    pass


def _class_without_a_module() -> Any:
    scope: dict[str, Any] = {}
    exec("class Settings:\n    scale = 2.0", scope)
    return scope["Settings"]


def _future() -> Any:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_result({"scale": 2.0})
    return future


class _Applies:
    def apply(self, settings: Any) -> Any:
        return settings["scale"]


def _peek(of: Any) -> float:
    state = of.get_state()
    value = float(of.uniform())
    of.set_state(state)
    return value


_Case = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]
_CONTENTS: dict[str, _Case] = {
    "class without a module": (
        _class_without_a_module,
        lambda of: of().scale,
        lambda of: setattr(of, "scale", 3.0),
    ),
    "instance of it": (
        lambda: _class_without_a_module()(),
        lambda of: of.scale,
        lambda of: setattr(type(of), "scale", 3.0),
    ),
    "default of a context variable": (
        lambda: contextvars.ContextVar("v", default={"scale": 2.0}),  # noqa: B039
        lambda of: of.get()["scale"],
        lambda of: of.get().update(scale=3.0),
    ),
    "context variable set to None": (
        lambda: contextvars.ContextVar("v", default=5.0),
        lambda of: of.get() or 1.0,
        lambda of: of.set(None),
    ),
    "array of a class of its own": (
        lambda: np.full(2, 2.0).view(_Tagged),
        lambda of: float(of[0]),
        lambda of: of.__setitem__(0, 3.0),
    ),
    "decimal context": (
        lambda: decimal.Context(prec=20),
        lambda of: float(of.divide(1, 3)),
        lambda of: setattr(of, "prec", 2),
    ),
    "random state": (lambda: np.random.RandomState(0), _peek, lambda of: of.seed(5)),
    "future": (
        _future,
        lambda of: of.result()["scale"],
        lambda of: of.result().update(scale=3.0),
    ),
    "cell": (
        lambda: types.CellType(2.0),
        lambda of: of.cell_contents,
        lambda of: setattr(of, "cell_contents", 3.0),
    ),
    "caller of methods": (
        lambda: operator.methodcaller("apply", {"scale": 2.0}),
        lambda of: of(_Applies()),
        lambda of: of.__reduce__()[1][1].update(scale=3.0),
    ),
}


@pytest.mark.parametrize("kind", _CONTENTS)
def test_contents(partitions: Any, kind: str) -> None:
    make, read, change = _CONTENTS[kind]
    value = make()
    held = Plain(v=value)
    assert_replays_follow(partitions, lambda x: x * read(held.v), lambda: change(value))


def test_what_a_key_function_reads(partitions: Any) -> None:
    settings = {"sign": 1}
    key = functools.cmp_to_key(lambda a, b: (a - b) * settings["sign"])
    held = Plain(key=key)
    call = lambda x: x * sorted([1.0, 2.0], key=held.key)[0]  # noqa: E731
    assert_replays_follow(partitions, call, lambda: settings.update(sign=-1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter([1, 2, 3]),
        lambda: iter({"a": 1}.items()),
        lambda: _Duration(seconds=2),
        lambda: decimal.Decimal(2),
        lambda: range(3),
        lambda: collections.deque([1.0], maxlen=2),
        lambda: [1, 2].__len__,
    ],
)
def test_made_anew_in_each_call(partitions: Any, make: Callable[[], Any]) -> None:
    held = Plain(v=None)

    def call(x: torch.Tensor) -> torch.Tensor:
        held.v = make()
        return x * 2

    graphed = pygraph.graph(call)
    for _ in range(14):
        assert torch.equal(graphed(X), X * 2)
    assert replays(partitions)


def test_a_class_that_tells_no_module(partitions: Any) -> None:
    base: Any = type("Base", (), {"__module__": None})
    derived: Any = type("Derived", (base,), {})
    held = Plain(v=derived())
    held.v.scale = 2.0
    assert_replays_follow(partitions, lambda x: x * held.v.scale, lambda: setattr(held.v, "scale", 3.0))
