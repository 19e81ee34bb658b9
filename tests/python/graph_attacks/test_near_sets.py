"""Sets, deques and slots with contents that are nearly equal to those of another call."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph

from .attacked import X, assert_follows, replays


class _Slots:
    __slots__ = ("names", "scale")

    def __init__(self, names: Any = (), scale: float = 1.0) -> None:
        self.names, self.scale = names, scale


def _sum(x: torch.Tensor, numbers: Any) -> torch.Tensor:
    """Depends on their order."""
    for number in numbers:
        x = x * 2 + number
    return x


def _refill(items: set[Any], *others: Any) -> None:
    items.clear()
    for other in others:
        items.add(other)


def test_order_of_a_set(partitions: Any) -> None:
    items = {0, 8}
    _refill(items, 0, 8)
    assert_follows(partitions, lambda x: _sum(x, items), lambda: _refill(items, 8, 0))


@pytest.mark.parametrize("kind", [set, frozenset])
def test_another_set_in_another_order(partitions: Any, kind: Any) -> None:
    held = [kind((0, 8))]
    assert list(held[0]) != list(kind((8, 0)))
    assert_follows(partitions, lambda x: _sum(x, held[0]), lambda: held.__setitem__(0, kind((8, 0))))


@pytest.mark.parametrize(
    ("one", "other"), [(0.0, -0.0), (1 + 0j, complex(1, -0.0)), (1, True), (1, 1.0)]
)
@pytest.mark.parametrize("kind", [set, frozenset, collections.deque])
def test_an_equal_item(partitions: Any, kind: Any, one: Any, other: Any) -> None:
    held = [kind([one])]
    is_it = lambda: repr(next(iter(held[0]))) == repr(one)  # noqa: E731

    def change() -> None:
        if kind is frozenset:
            held[0] = frozenset([other])
        else:
            held[0].clear()
            (held[0].add if kind is set else held[0].append)(other)

    assert_follows(partitions, lambda x: x + (2.0 if is_it() else 3.0), change)


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1, True)])
def test_an_equal_slot(partitions: Any, one: Any, other: Any) -> None:
    value: Any = _Slots(scale=one)
    call = lambda x: x + (2.0 if repr(value.scale) == repr(one) else 3.0)  # noqa: E731
    assert_follows(partitions, call, lambda: setattr(value, "scale", other))


@pytest.mark.parametrize(
    "again",
    [
        lambda of: setattr(of, "names", {"a", "".join(["b", "c"])}),
        lambda of: setattr(of, "names", ["a", "".join(["b", "c"])]),
        lambda of: setattr(of, "names", frozenset({"a", "".join(["b", "c"])})),
        lambda of: setattr(of, "scale", float("1.0")),
        lambda of: of.names.add("d") or of.names.discard("d") if isinstance(of.names, set) else None,
    ],
)
def test_equal_contents_at_each_call_are_served(partitions: Any, again: Callable[[Any], None]) -> None:
    value: Any = _Slots({"a", "bc"})
    call = lambda x: x * value.scale + len(value.names)  # noqa: E731
    graphed = pygraph.graph(call)
    for _ in range(20):
        again(value)
        assert torch.equal(graphed(X), call(X))
    assert replays(partitions) > 10, [row.reason for row in pygraph.stats()]


def test_items_that_another_thread_replaces(partitions: Any) -> None:
    class Item:
        def __init__(self, number: int) -> None:
            self.number = number

        def __hash__(self) -> int:
            return self.number % 3

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Item) and other.number == self.number

        def __del__(self) -> None:
            items.discard(100 + self.number)

    items: set[Any] = set(range(50))
    value, ended = _Slots(items), threading.Event()

    def replace() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            items.add(number % 200)
            items.discard(number * 7 % 200)
            items.add(Item(number % 30))
            items.discard(Item(number * 3 % 30))
            value.scale = float(number % 3)
            if number % 500 == 0:
                items.clear()

    thread = threading.Thread(target=replace)
    thread.start()
    graphed = pygraph.graph(lambda x: x * 2 + 0 * len(value.names) + 0 * value.scale)
    try:
        for _ in range(200):
            assert torch.equal(graphed(X), X * 2)
    finally:
        ended.set()
        thread.join()
