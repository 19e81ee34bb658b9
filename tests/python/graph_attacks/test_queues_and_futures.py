"""Objects whose state is in no attribute: queues, futures, coroutines, generators of bits, the
context of decimal numbers."""

from __future__ import annotations

import asyncio
import decimal
import queue
import types
from typing import Any

import pytest
import torch

import pygraph

from .attacked import X, assert_follows, assert_replays_follow


@pytest.mark.parametrize("who", ["the program", "the step"])
def test_a_queue_of_one_number(partitions: Any, who: str) -> None:
    values: queue.SimpleQueue[float] = queue.SimpleQueue()
    values.put(2.0)

    def read(x: torch.Tensor) -> torch.Tensor:
        value = values.get()
        values.put(value)
        return x * value

    def count(x: torch.Tensor) -> torch.Tensor:
        values.put(values.get() + 1)
        return x * 2

    def change() -> None:
        values.get()
        values.put(3.0)

    if who == "the program":
        assert_follows(partitions, read, change)
        return
    graphed = pygraph.graph(count)
    for _ in range(12):
        graphed(X)
    assert values.get() == 14.0


def test_a_queue_of_many(partitions: Any) -> None:
    """Some of which were taken, so that their places are free."""
    values: queue.SimpleQueue[float] = queue.SimpleQueue()
    for i in range(20):
        values.put(float(i))
    for _ in range(7):
        values.get()

    def change() -> None:
        for i in range(20, 33):
            values.get()
            values.put(float(i))

    def function(x: torch.Tensor) -> torch.Tensor:
        taken = [values.get() for _ in range(values.qsize())]
        for value in taken:
            values.put(value)
        return x * sum(taken)

    assert_follows(partitions, function, change)


def test_a_future_of_pytorchs(partitions: Any) -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    assert_replays_follow(
        partitions, lambda x: x * (3.0 if future.done() else 2.0), lambda: future.set_result(1)
    )


def test_the_result_of_a_future(partitions: Any) -> None:
    result = {"scale": 2.0}
    future: torch.futures.Future[dict[str, float]] = torch.futures.Future()
    future.set_result(result)
    assert_replays_follow(
        partitions, lambda x: x * future.value()["scale"], lambda: result.update(scale=3.0)
    )


def test_a_future_of_asyncio(partitions: Any) -> None:
    loop = asyncio.new_event_loop()
    future = loop.create_future()
    try:
        assert_replays_follow(
            partitions, lambda x: x * (3.0 if future.done() else 2.0), lambda: future.set_result(1)
        )
    finally:
        loop.close()


def test_a_generator_of_bits(partitions: Any) -> None:
    """By itself, without a generator of numbers."""
    numpy = pytest.importorskip("numpy")
    bits, expected = numpy.random.PCG64(0), numpy.random.PCG64(0)

    def step(x: torch.Tensor) -> torch.Tensor:
        bits.random_raw()
        return x * 2

    graphed = pygraph.graph(step)
    for _ in range(12):
        graphed(X)
        expected.random_raw()
    assert bits.random_raw() == expected.random_raw()


def test_the_precision_of_decimal_numbers(partitions: Any) -> None:
    with decimal.localcontext() as context:
        assert_replays_follow(
            partitions,
            lambda x: x * float(decimal.Decimal(1) / decimal.Decimal(3)),
            lambda: setattr(context, "prec", 3),
        )


def test_a_coroutine_that_holds_a_number(partitions: Any) -> None:
    @types.coroutine
    def switch() -> Any:
        value = 2.0
        while True:
            sent = yield value
            value = value if sent is None else sent

    async def held() -> None:
        await switch()

    scale = held()
    scale.send(None)
    try:
        assert_replays_follow(partitions, lambda x: x * scale.send(None), lambda: scale.send(3.0))
    finally:
        scale.close()


def test_variables_of_a_coroutine(partitions: Any) -> None:
    settings = {"scale": 2.0}

    @types.coroutine
    def pause() -> Any:
        yield

    async def held(settings: dict[str, float]) -> None:
        await pause()

    waiting: Any = held(settings)
    waiting.send(None)
    try:
        assert_replays_follow(
            partitions,
            lambda x: x * waiting.cr_frame.f_locals["settings"]["scale"],
            lambda: settings.update(scale=3.0),
        )
    finally:
        waiting.close()
