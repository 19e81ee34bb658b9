"""Steps that hand work to other threads, whose operators no observation or recording sees."""

from __future__ import annotations

import concurrent.futures
import queue
import sys
import threading
from typing import Any

import pytest
import torch

import pygraph

from .attacked import X, replays

_TEXT = "it hands work to another thread"


def _assert_refused(partitions: Any, function: Any, text: str) -> None:
    graphed = pygraph.graph(function)
    for i in range(12):
        x = torch.full((4,), float(i))
        assert torch.equal(graphed(x), function(x))
    reason = next((row.reason for row in pygraph.stats() if row.reason), "")
    assert text in reason, reason
    assert "(test_other_threads.py:" in reason
    assert replays(partitions) == 0


def test_a_pool_works_on_a_tensor_of_the_steps(partitions: Any) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:

        def step(x: torch.Tensor) -> torch.Tensor:
            h = x * 2
            pool.submit(h.mul_, 3).result()
            return h + 1

        _assert_refused(partitions, step, _TEXT)


def test_a_thread_of_the_steps_own(partitions: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        thread = threading.Thread(target=h.mul_, args=(3,))
        thread.start()
        thread.join()
        return h + 1

    _assert_refused(partitions, step, _TEXT)


@pytest.mark.parametrize("kind", [queue.Queue, queue.SimpleQueue])
def test_a_queue_of_a_worker(partitions: Any, kind: Any) -> None:
    """Such as one that writes a log."""
    tasks, written = kind(), []

    def work() -> None:
        while (task := tasks.get()) is not None:
            written.append(task)

    thread = threading.Thread(target=work)
    thread.start()
    put = tasks.put

    def step(x: torch.Tensor) -> torch.Tensor:
        put(1.0)
        return x * 2

    try:
        graphed = pygraph.graph(step)
        for _ in range(12):
            graphed(X)
    finally:
        tasks.put(None)
        thread.join()
    assert len(written) == 12
    assert replays(partitions) == 0


def test_signals_between_threads(partitions: Any) -> None:
    begin, done, end = threading.Semaphore(0), threading.Semaphore(0), threading.Event()
    parts: list[torch.Tensor] = []

    def work() -> None:
        while begin.acquire() and not end.is_set():
            parts.pop().mul_(3)
            done.release()

    thread = threading.Thread(target=work)
    thread.start()

    def step(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        parts.append(h)
        begin.release()
        done.acquire()
        return h + 1

    try:
        _assert_refused(partitions, step, "")
    finally:
        end.set()
        begin.release()
        thread.join()


def test_other_threads_do_what_they_like(partitions: Any) -> None:
    """Work that other threads hand over while a call is observed is no matter of the step's."""
    is_over, tasks = threading.Event(), queue.SimpleQueue[int]()

    def work() -> None:
        while not is_over.is_set():
            tasks.put(1)
            tasks.get()

    thread = threading.Thread(target=work)
    thread.start()
    graphed = pygraph.graph(lambda x: x * 2)
    try:
        for _ in range(12):
            graphed(X)
    finally:
        is_over.set()
        thread.join()
    assert replays(partitions) > 0


def test_a_profile_function_of_the_programs(partitions: Any) -> None:
    """It is told of all that it would be told, and is there afterwards."""
    seen: list[str] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def look(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code is function.__code__:
            seen.append(event)

    graphed = pygraph.graph(function)
    sys.setprofile(look)
    try:
        for _ in range(2):
            graphed(X)
        assert sys.getprofile() is look
    finally:
        sys.setprofile(None)
    assert len(seen) == 2


def test_a_step_that_sets_a_profile_function(partitions: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        sys.setprofile(None)
        return x * 2

    graphed = pygraph.graph(step)
    for _ in range(12):
        graphed(X)
    reasons = [row.reason for row in pygraph.stats()]
    assert any("profile function" in reason for reason in reasons)
    assert replays(partitions) == 0
