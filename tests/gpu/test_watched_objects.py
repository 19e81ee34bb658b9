"""Queues, generators and futures that a graphed callable reads or changes."""

from __future__ import annotations

import queue
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from .watched import WARM, assert_follows, given, graphed


def _called(step: Callable[[torch.Tensor], torch.Tensor]) -> None:
    call, x = graphed(step), given()
    for _ in range(WARM):
        call(x)


def test_a_queue_that_the_program_fills() -> None:
    values: queue.SimpleQueue[float] = queue.SimpleQueue()
    values.put(1.0)

    def read(x: torch.Tensor) -> torch.Tensor:
        value = values.get()
        values.put(value)
        return x * value

    def change() -> None:
        values.get()
        values.put(2.0)

    assert_follows(read, change, is_replayed=None)


def test_a_queue_in_which_the_step_counts() -> None:
    values: queue.SimpleQueue[float] = queue.SimpleQueue()
    values.put(1.0)

    def count(x: torch.Tensor) -> torch.Tensor:
        values.put(values.get() + 1)
        return x * 2

    _called(count)
    assert values.get() == 1.0 + WARM


def test_a_generator_of_bits_that_the_step_draws_from() -> None:
    numpy = pytest.importorskip("numpy")
    bits, expected = numpy.random.PCG64(0), numpy.random.PCG64(0)

    def step(x: torch.Tensor) -> torch.Tensor:
        bits.random_raw()
        return x * 2

    _called(step)
    expected.random_raw(WARM)
    assert bits.random_raw() == expected.random_raw()


def test_a_coroutine_that_holds_a_number() -> None:
    @types.coroutine
    def switch() -> Any:
        value = 1.0
        while True:
            sent = yield value
            value = value if sent is None else sent

    async def held() -> None:
        await switch()

    scale: Any = held()
    scale.send(None)
    try:
        assert_follows(lambda x: x * scale.send(None), lambda: scale.send(2.0))
    finally:
        scale.close()


def test_a_future_of_pytorchs_is_done() -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    assert_follows(lambda x: x * (2.0 if future.done() else 1.0), lambda: future.set_result(1))
