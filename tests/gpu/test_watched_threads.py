"""Objects of Python's threads and loggers that a graphed callable reads or changes."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from .watched import WARM, assert_follows, given, graphed, replays


def _called(step: Callable[[torch.Tensor], torch.Tensor]) -> None:
    call, x = graphed(step), given()
    for _ in range(WARM):
        call(x)


@pytest.mark.parametrize("kind", ["Event", "Condition", "Thread", "Logger"])
def test_an_attribute_of_an_object_of_pythons_threads(kind: str) -> None:
    makers: dict[str, Callable[[], Any]] = {
        "Event": threading.Event,
        "Condition": threading.Condition,
        "Thread": lambda: threading.Thread(target=print),
        "Logger": lambda: logging.Logger("of its own"),
    }
    holder = makers[kind]()
    holder.settings = {"scale": 1.0}
    assert_follows(lambda x: x * holder.settings["scale"], lambda: holder.settings.update(scale=2.0))


def test_calls_are_counted_in_a_thread_object() -> None:
    holder: Any = threading.Thread(target=print)
    holder.steps = 0

    def step(x: torch.Tensor) -> torch.Tensor:
        holder.steps += 1
        return x * 2

    _called(step)
    assert holder.steps == WARM


@pytest.mark.parametrize("what", ["a lock is taken", "a thread is alive"])
def test_whether(what: str) -> None:
    lock, end = threading.Lock(), threading.Event()
    thread = threading.Thread(target=end.wait, args=(60,), daemon=True)
    thread.start()

    def change() -> None:
        lock.acquire()
        end.set()
        thread.join(60)

    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "a lock is taken": lambda x: x * (2.0 if lock.locked() else 1.0),
        "a thread is alive": lambda x: x * (2.0 if thread.is_alive() else 1.0),
    }
    try:
        assert_follows(functions[what], change)
    finally:
        end.set()


def test_each_thread_has_a_model_of_its_own() -> None:
    models: dict[int, torch.nn.Linear] = {}
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    x = torch.randn(4, 8, device="cuda")

    def infer(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return models[threading.get_ident()](x)

    call = graphed(infer)

    def work() -> None:
        models[threading.get_ident()] = torch.nn.Linear(8, 8, device="cuda")
        results.extend((call(x), infer(x)) for _ in range(4))

    models[threading.get_ident()] = torch.nn.Linear(8, 8, device="cuda")
    for _ in range(WARM):
        call(x)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert len(results) == 4 and all(torch.equal(a, b) for a, b in results)


def test_a_function_is_called_while_an_exception_is_handled() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * (2.0 if sys.exc_info()[0] is not None else 1.0)

    call, x = graphed(function), given()
    for _ in range(WARM):
        call(x)
    try:
        raise ValueError
    except ValueError:
        assert torch.equal(call(x), function(x))
    assert torch.equal(call(x), function(x)) and replays() > 0


def test_the_level_of_a_logger_that_is_looked_up() -> None:
    logger = logging.getLogger("pygraph_tests.level")
    logger.setLevel(logging.WARNING)

    def function(x: torch.Tensor) -> torch.Tensor:
        is_on = logging.getLogger("pygraph_tests.level").isEnabledFor(logging.DEBUG)
        return x * (2.0 if is_on else 1.0)

    assert_follows(function, lambda: logger.setLevel(logging.DEBUG))


def test_messages_of_a_logger_that_is_turned_on() -> None:
    messages: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record)

    logger = logging.getLogger("pygraph_tests.messages")
    logger.propagate = False
    logger.setLevel(logging.WARNING)

    def step(x: torch.Tensor) -> torch.Tensor:
        logging.getLogger("pygraph_tests.messages").info("a step")
        return x * 2

    call, x = graphed(step), given()
    for _ in range(WARM):
        call(x)
    logger.addHandler(Handler())
    logger.setLevel(logging.INFO)
    for _ in range(5):
        call(x)
    assert len(messages) == 5


def test_warnings_that_are_recorded() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("the loss is high", stacklevel=1)
        return x * 2

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        _called(step)
    assert sum("the loss is high" in str(of.message) for of in seen) == WARM
