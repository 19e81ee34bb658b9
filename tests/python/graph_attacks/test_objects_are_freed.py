"""Objects that are passed are not kept once they are of no use: each call may pass a new one."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

import pygraph

from .attacked import Plain, X, replays


def _alive(partitions: Any, graphed: Any, calls: int, between: Any = lambda: None) -> int:
    """How many of the objects that were passed are alive after so many calls. Lets go of partitions
    that have not replayed."""
    known = []
    for i in range(calls):
        batch = Plain(x=torch.full((4,), float(i)), is_last=False)
        known.append(weakref.ref(batch))
        assert torch.equal(graphed(batch), batch.x * 2)
        between()
    del batch
    partitions.all[:] = [partition for partition in partitions.all if partition.replays]
    gc.collect()
    return sum(of() is not None for of in known)


def test_after_the_callable_has_given_up(partitions: Any) -> None:
    graphed = pygraph.graph(lambda batch: batch.x * 2)
    assert _alive(partitions, graphed, 40) == 0
    assert "differs from call to call" in pygraph.stats()[0].reason


def test_of_calls_that_are_refused(partitions: Any) -> None:
    def f(batch: Any) -> Any:
        torch.rand(1)
        return batch.x * 2

    assert _alive(partitions, pygraph.graph(f), 40) == 0


def test_between_calls_that_have_a_graph(partitions: Any) -> None:
    one = Plain(x=X, is_last=False)
    graphed = pygraph.graph(lambda batch: batch.x * 2)
    for _ in range(8):
        graphed(one)
    assert _alive(partitions, graphed, 60, lambda: graphed(one)) <= 8
    assert replays(partitions) > 60


def test_an_object_that_is_passed_again(partitions: Any) -> None:
    """It has its graph, however many others are passed in between."""
    one = Plain(x=X, is_last=False)
    graphed = pygraph.graph(lambda batch: batch.x * 2)
    for _ in range(4):
        graphed(one)
    _alive(partitions, graphed, 40)
    made = replays(partitions)
    for _ in range(8):
        assert torch.equal(graphed(one), X * 2)
    assert replays(partitions) >= made + 8
