"""Results that a replay cannot make, as they are no plain, new values: such callables have no graph."""

from __future__ import annotations

import enum
from typing import Any

import pytest
import torch

import pygraph

from .attacked import X, replays


def _reason() -> str:
    return " ".join(row.reason for row in pygraph.stats() if row.reason)


def test_attributes_of_a_result(partitions: Any) -> None:
    def f(x: Any) -> Any:
        y = x * 2
        y.weight = 3.0
        return y

    graphed = pygraph.graph(f)
    for i in range(12):
        y = graphed(X + i)
        assert torch.equal(y, (X + i) * 2) and y.weight == 3.0, f"call {i + 1}"
    assert "with the attribute weight" in _reason()


def test_attributes_of_a_loss_whose_backward_is_run(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))

    def f(x: Any) -> Any:
        p.grad = None
        loss = (p * x).sum()
        loss.backward()
        loss.name_of_it = "loss"
        return {"loss": loss}

    graphed = pygraph.graph(f)
    for i in range(12):
        assert graphed(X)["loss"].name_of_it == "loss", f"call {i + 1}"


@pytest.mark.parametrize("name", ["Parameter", "Buffer"])
def test_a_new_parameter(partitions: Any, name: str) -> None:
    class_ = getattr(torch.nn, name)

    def f(x: Any) -> Any:
        return class_(x * 2, requires_grad=False) if name == "Parameter" else class_(x * 2)

    graphed = pygraph.graph(f)
    for i in range(12):
        assert isinstance(graphed(X), class_), f"call {i + 1}"
    assert ("returns a Parameter" if name == "Parameter" else "with the attribute") in _reason()


def test_a_parameter_of_the_model(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    graphed = pygraph.graph(lambda x: (p, x * p))
    for i in range(12):
        assert graphed(X)[0] is p, f"call {i + 1}"


def test_a_parameter_that_is_passed(partitions: Any) -> None:
    """A graph's replay returns what is passed itself."""
    p = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    graphed = pygraph.graph(lambda x, p: (p, x * p))
    for i in range(12):
        assert torch.equal(graphed(X, p)[0], p), f"call {i + 1}"
    assert replays(partitions) > 0


@pytest.mark.parametrize("kind", [list, dict])
def test_a_container_that_is_passed(partitions: Any, kind: type) -> None:
    key: Any = 0 if kind is list else "x"

    def f(batch: Any) -> Any:
        return batch, batch[key] * 2

    graphed = pygraph.graph(f)
    for i in range(12):
        batch: Any = [X] if kind is list else {"x": X}
        same, y = graphed(batch)
        assert same is batch and torch.equal(y, X * 2), f"call {i + 1}"
    assert "that is passed to it" in _reason()


@pytest.mark.parametrize("has_loss", [False, True])
def test_a_container_that_is_there_twice(partitions: Any, has_loss: bool) -> None:
    p = torch.nn.Parameter(torch.ones(4))

    def f(x: Any) -> Any:
        p.grad = None
        loss = (p * x).sum()
        if has_loss:
            loss.backward()
        metrics = {"loss": loss if has_loss else loss.detach()}
        return metrics, (metrics, 1)

    graphed = pygraph.graph(f)
    for i in range(12):
        first, (second, _) = graphed(X)
        assert first is second, f"call {i + 1}"
    assert "twice" in _reason()


def test_tuples_and_empty_containers(partitions: Any) -> None:
    pair = (1, 2)
    graphed = pygraph.graph(lambda x: (pair, pair, x * 2, {}, [], {}))
    for _ in range(12):
        first, second, y, *_ = graphed(X)
        assert first == second == pair and torch.equal(y, X * 2)
    assert replays(partitions) > 0


@pytest.mark.parametrize("base", [float, int, str])
def test_a_number_with_notes(partitions: Any, base: Any) -> None:
    class Noted(base):  # type: ignore[misc]
        pass

    def f(x: Any) -> Any:
        metric = Noted(2)
        metric.notes = []
        return metric, x * 2

    graphed = pygraph.graph(f)
    for i in range(12):
        metric, _ = graphed(X)
        assert metric.notes == [], f"call {i + 1}"
        metric.notes.append(i)
    assert "returns a Noted" in _reason()


class _Level(enum.IntEnum):
    LOW = 1


def test_numbers_that_cannot_be_changed(partitions: Any) -> None:
    numpy = pytest.importorskip("numpy")
    graphed = pygraph.graph(lambda x: (x * 2, _Level.LOW, numpy.float64(1.5), True, None, "a", 1j))
    for _ in range(12):
        assert graphed(X)[1:] == (_Level.LOW, 1.5, True, None, "a", 1j)
    assert replays(partitions) > 0


def test_a_container_that_contains_itself(partitions: Any) -> None:
    def f(x: Any) -> Any:
        found: dict[str, Any] = {"x": x * 2}
        found["self"] = found
        return found

    graphed = pygraph.graph(f)
    for _ in range(12):
        assert torch.equal(graphed(X)["x"], X * 2)
