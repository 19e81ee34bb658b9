"""Generators whose own variables do not tell where they stand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import pygraph

from .attacked import X, assert_follows, replays

_VALUES = [1.0] * 12 + [5.0] * 30  # the same one until the graph has been compared


def _from_another() -> Iterator[float]:
    def inner() -> Iterator[float]:
        for _ in range(12):
            yield 1.0
        while True:
            yield 5.0

    yield from inner()


def _from_a_list() -> Iterator[float]:
    yield from _VALUES


def _in_a_loop() -> Iterator[float]:
    for value in _VALUES:
        yield value * 1


@pytest.mark.parametrize(
    "make", [_from_another, _from_a_list, _in_a_loop, lambda: (v for v in _VALUES)]
)
def test_a_generator_that_moves_on(partitions: Any, make: Callable[[], Iterator[float]]) -> None:
    moving = make()
    run = pygraph.graph(lambda x: x * next(moving))
    for i, value in enumerate(_VALUES[:30]):
        assert torch.equal(run(X), X * value), i
    assert replays(partitions) == 0


def test_an_object_that_a_generator_reads(partitions: Any) -> None:
    class Schedule:
        scale = 1.0

        def values(self) -> Iterator[float]:
            while True:
                yield self.scale

    schedule = Schedule()
    values = schedule.values()
    assert_follows(partitions, lambda x: x * next(values), lambda: setattr(schedule, "scale", 5.0))
    assert replays(partitions) > 0
