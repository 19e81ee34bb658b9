"""Objects of Python's threads and warnings, and what tells of the calling thread."""

from __future__ import annotations

import concurrent.futures
import logging
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph

from .attacked import X, assert_replays_follow, replays


@pytest.mark.parametrize("kind", ["Event", "Condition", "Thread", "Logger"])
def test_an_attribute_that_the_program_has_given(partitions: Any, kind: str) -> None:
    makers: dict[str, Callable[[], Any]] = {
        "Event": threading.Event,
        "Condition": threading.Condition,
        "Thread": lambda: threading.Thread(target=print),
        "Logger": lambda: logging.Logger("of its own"),
    }
    holder = makers[kind]()
    holder.settings = {"scale": 2.0}
    change = lambda: holder.settings.update(scale=3.0)  # noqa: E731
    assert_replays_follow(partitions, lambda x: x * holder.settings["scale"], change)


def test_an_attribute_that_the_program_gives_later(partitions: Any) -> None:
    holder: Any = threading.Event()
    assert_replays_follow(
        partitions,
        lambda x: x * getattr(holder, "scale", 2.0),
        lambda: setattr(holder, "scale", 3.0),
    )


def test_calls_are_counted_in_a_thread(partitions: Any) -> None:
    holder: Any = threading.Thread(target=print)
    holder.steps = 0

    def step(x: torch.Tensor) -> torch.Tensor:
        holder.steps += 1
        return x * 2

    graphed = pygraph.graph(step)
    for _ in range(12):
        graphed(X)
    assert holder.steps == 12


def test_a_thread_that_is_used_keeps_its_graphs(partitions: Any) -> None:
    """What Python itself changes in such objects is no change."""
    event = threading.Event()
    graphed = pygraph.graph(lambda x: x * (3.0 if event.is_set() else 2.0))
    for _ in range(12):
        event.wait(0)
        assert torch.equal(graphed(X), X * 2)
    assert replays(partitions) > 0


@pytest.mark.parametrize("what", ["a lock is taken", "a thread is alive"])
def test_whether(partitions: Any, what: str) -> None:
    lock, end = threading.Lock(), threading.Event()
    thread = threading.Thread(target=end.wait, args=(60,), daemon=True)
    thread.start()

    def change() -> None:
        lock.acquire()
        end.set()
        thread.join(60)

    functions: dict[str, Any] = {
        "a lock is taken": lambda x: x * (3.0 if lock.locked() else 2.0),
        "a thread is alive": lambda x: x * (3.0 if thread.is_alive() else 2.0),
    }
    try:
        assert_replays_follow(partitions, functions[what], change)
    finally:
        end.set()


@pytest.mark.parametrize("ask", [threading.get_ident, lambda: id(threading.current_thread())])
def test_the_calling_thread_is_asked_for(partitions: Any, ask: Callable[[], int]) -> None:
    scales = {ask(): 2.0}
    function = lambda x: x * scales.get(ask(), 3.0)  # noqa: E731
    graphed = pygraph.graph(function)
    for _ in range(12):
        assert torch.equal(graphed(X), X * 2)
    assert replays(partitions) > 0
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(graphed(X) for _ in range(12)))
    thread.start()
    thread.join(60)
    assert len(found) == 12 and all(torch.equal(of, X * 3) for of in found)


def test_an_exception_is_handled(partitions: Any) -> None:
    graphed = pygraph.graph(lambda x: x * (3.0 if sys.exc_info()[0] is not None else 2.0))
    for _ in range(12):
        graphed(X)
    assert replays(partitions) > 0
    try:
        raise ValueError
    except ValueError:
        assert torch.equal(graphed(X), X * 3)
    made = replays(partitions)
    assert torch.equal(graphed(X), X * 2) and replays(partitions) == made + 1


def test_warnings_that_are_recorded(partitions: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("the loss is high", stacklevel=1)
        return x * 2

    graphed = pygraph.graph(step)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(12):
            graphed(X)
    assert sum("the loss is high" in str(of.message) for of in seen) == 12


def test_filters_of_warnings_change(partitions: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("the loss is high", stacklevel=1)
        return x * 2

    graphed = pygraph.graph(step)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("ignore")
        for _ in range(12):
            graphed(X)
        assert replays(partitions) > 0
        warnings.simplefilter("always")
        for _ in range(5):
            graphed(X)
    assert sum("the loss is high" in str(of.message) for of in seen) == 5


@pytest.mark.parametrize("what", ["daemon", "interval", "broken", "max_workers"])
def test_what_an_object_of_pythons_threads_has(partitions: Any, what: str) -> None:
    thread, timer = threading.Thread(target=print), threading.Timer(2.0, print)
    barrier, pool = threading.Barrier(2), concurrent.futures.ThreadPoolExecutor(2)
    cases: dict[str, tuple[Any, Any]] = {
        "daemon": (
            lambda x: x * (3.0 if thread.daemon else 2.0),
            lambda: setattr(thread, "daemon", True),
        ),
        "interval": (lambda x: x * timer.interval, lambda: setattr(timer, "interval", 3.0)),
        "broken": (lambda x: x * (3.0 if barrier.broken else 2.0), barrier.abort),
        "max_workers": (lambda x: x * pool._max_workers, lambda: setattr(pool, "_max_workers", 3)),
    }
    assert_replays_follow(partitions, *cases[what])
