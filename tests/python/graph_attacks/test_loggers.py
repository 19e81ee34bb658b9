"""Loggers and handlers: how a step comes to them, and what it asks them."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any

import pytest
import torch

import pygraph

from .attacked import X, assert_replays_follow, replays


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def _assert_messages(partitions: Any, step: Any, logger: logging.Logger) -> None:
    handler, level = _Messages(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    graphed = pygraph.graph(step)
    try:
        for _ in range(12):
            graphed(X)
        assert replays(partitions) > 0
        logger.setLevel(logging.DEBUG)
        for _ in range(5):
            graphed(X)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert handler.found.count("a step") == 5


def test_the_level_of_a_logger_that_is_looked_up(partitions: Any) -> None:
    logger = logging.getLogger("pygraph_tests.level")
    logger.setLevel(logging.WARNING)

    def function(x: torch.Tensor) -> torch.Tensor:
        is_on = logging.getLogger("pygraph_tests.level").isEnabledFor(logging.DEBUG)
        return x * (3.0 if is_on else 2.0)

    assert_replays_follow(partitions, function, lambda: logger.setLevel(logging.DEBUG))


def test_messages_of_a_logger_by_its_name(partitions: Any) -> None:
    def step(x: Any) -> Any:
        logging.getLogger("pygraph_tests.messages").info("a step")
        return x * 2

    _assert_messages(partitions, step, logging.getLogger("pygraph_tests.messages"))


def test_messages_of_the_root(partitions: Any) -> None:
    def step(x: Any) -> Any:
        logging.info("a step")
        return x * 2

    _assert_messages(partitions, step, logging.root)


def test_messages_of_a_logger_adapter(partitions: Any) -> None:
    logger = logging.getLogger("pygraph_tests.adapter")
    adapter = logging.LoggerAdapter(logger, {"rank": 0})

    def step(x: Any) -> Any:
        adapter.debug("a step")
        return x * 2

    _assert_messages(partitions, step, logger)


def test_what_a_logger_adapter_has(partitions: Any) -> None:
    adapter: Any = logging.LoggerAdapter(logging.getLogger("pygraph_tests.extra"), {"scale": 2.0})
    change = lambda: adapter.extra.update(scale=3.0)  # noqa: E731
    assert_replays_follow(partitions, lambda x: x * adapter.extra["scale"], change)


def _get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


_NAME = "pygraph_tests.constant"


def test_messages_of_a_logger_of_the_programs_own_function(partitions: Any) -> None:
    def step(x: Any) -> Any:
        _get_logger("pygraph_tests.helper").debug("a step")
        return x * 2

    _assert_messages(partitions, step, logging.getLogger("pygraph_tests.helper"))


def test_messages_of_a_logger_whose_name_is_a_constant(partitions: Any) -> None:
    def step(x: Any) -> Any:
        logging.getLogger(_NAME).debug("a step")
        return x * 2

    _assert_messages(partitions, step, logging.getLogger(_NAME))


def test_messages_of_a_loggers_child(partitions: Any) -> None:
    logger = logging.getLogger("pygraph_tests.parent")

    def step(x: Any) -> Any:
        logger.getChild("loss").debug("a step")
        return x * 2

    _assert_messages(partitions, step, logging.getLogger("pygraph_tests.parent.loss"))


@pytest.mark.parametrize("what", ["handlers", "filters", "propagate", "level"])
def test_what_a_logger_has(partitions: Any, what: str) -> None:
    parent = logging.getLogger("pygraph_tests.of")
    logger = logging.getLogger(f"pygraph_tests.of.{what}")
    parent.setLevel(logging.INFO)
    logger.setLevel(logging.NOTSET)
    changes: dict[str, Any] = {
        "handlers": lambda: logger.addHandler(logging.NullHandler()),
        "filters": lambda: logger.addFilter(lambda record: True),
        "propagate": lambda: setattr(logger, "propagate", False),
        "level": lambda: logger.setLevel(logging.INFO),  # the effective one is the same
    }
    step = lambda x: x * (3.0 if getattr(logger, what) else 2.0)  # noqa: E731
    assert_replays_follow(partitions, step, changes[what])


def test_the_level_of_a_handler(partitions: Any) -> None:
    handler = logging.NullHandler()
    step = lambda x: x * (3.0 if handler.level >= logging.ERROR else 2.0)  # noqa: E731
    assert_replays_follow(partitions, step, lambda: handler.setLevel(logging.ERROR))


def test_the_stream_of_a_handler_that_a_call_makes(
    partitions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`logging.debug` makes the root's handler if there is none."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logging.root, "handlers", [])

    def step(x: Any) -> Any:
        logging.debug("a step")
        return x * 2

    pygraph.graph(step)(X)
    (handler,) = logging.root.handlers
    assert handler.stream is stream  # type: ignore[attr-defined]
