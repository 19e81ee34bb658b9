"""What processes share: memory, queues, events."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing import shared_memory
from typing import Any

import pytest
import torch

import pygraph

from .attacked import X, assert_follows


@pytest.fixture
def memory() -> Iterator[shared_memory.SharedMemory]:
    found = shared_memory.SharedMemory(create=True, size=8)
    yield found
    found.close()
    found.unlink()


def test_shared_memory(partitions: Any, memory: Any) -> None:
    memory.buf[0] = 1
    assert_follows(partitions, lambda x: x * memory.buf[0], lambda: memory.buf.__setitem__(0, 5))


def test_a_shared_list(partitions: Any) -> None:
    shared = shared_memory.ShareableList([1.0, 2.0])
    try:
        assert_follows(partitions, lambda x: x * shared[0], lambda: shared.__setitem__(0, 5.0))
    finally:
        shared.shm.close()
        shared.shm.unlink()


@pytest.mark.parametrize("kind", ["Event", "Semaphore", "BoundedSemaphore"])
def test_events_and_semaphores(partitions: Any, kind: str) -> None:
    if kind == "Event":
        event = multiprocessing.Event()
        assert_follows(partitions, lambda x: x * 2 if event.is_set() else x, event.set)
    else:
        of = getattr(multiprocessing, kind)(4)
        assert_follows(partitions, lambda x: x * of.get_value(), of.acquire)


def test_a_queue_that_the_call_feeds(partitions: Any) -> None:
    queue: Any = multiprocessing.Queue()

    @pygraph.graph
    def run(x: torch.Tensor) -> torch.Tensor:
        queue.put(1)
        return x * 2

    for _ in range(14):
        run(X)
        assert queue.get(timeout=10) == 1
