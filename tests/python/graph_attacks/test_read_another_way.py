"""Variables that are read by frames, by ``__globals__`` and by ``eval`` under another name."""

from __future__ import annotations

import builtins
import inspect
from typing import Any

import pytest
import torch

import pygraph

from .attacked import X, assert_follows

_SCALE = 2.0
_evaluate = builtins.eval


def _of_this_module() -> None:
    """Whose globals are read."""


def _with_a_frame() -> Any:
    scale = 2.0

    def put(value: float) -> None:
        nonlocal scale
        scale = value

    return (lambda: scale, inspect.currentframe()), put


@pytest.mark.parametrize("how", ["__globals__", "currentframe", "a frame that is kept"])
def test_variables_that_cannot_be_watched(
    partitions: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Such callables have no graph, and the reason says why."""
    monkeypatch.setitem(globals(), "_SCALE", 2.0)
    (_, frame), put = _with_a_frame()

    def change() -> None:
        globals()["_SCALE"] = 3.0
        put(3.0)

    functions: dict[str, Any] = {
        "__globals__": lambda x: x * _of_this_module.__globals__["_SCALE"],
        "currentframe": lambda x: x * inspect.currentframe().f_globals["_SCALE"],  # type: ignore[union-attr]
        "a frame that is kept": lambda x: x * frame.f_locals["scale"],
    }
    graphed = pygraph.graph(functions[how])
    for _ in range(8):
        graphed(X)
    change()
    assert torch.equal(graphed(X), X * 3)
    reasons = {row.reason for row in pygraph.stats() if row.reason}
    assert any("it may read variables through" in reason for reason in reasons), reasons


@pytest.mark.parametrize("how", ["a global", "a module", "a closure"])
def test_another_name_of_eval(partitions: Any, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setitem(globals(), "_SCALE", 2.0)
    inner = builtins.eval
    functions: dict[str, Any] = {
        "a global": lambda x: x * _evaluate("_SCALE"),
        "a module": lambda x: x * builtins.eval("_SCALE"),
        "a closure": lambda x: x * inner("_SCALE"),
    }
    assert_follows(partitions, functions[how], lambda: globals().update(_SCALE=3.0))
