"""Graphed callables give what the uncaptured ones give, whatever they return and are passed."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph

_CALLS = 24  # after which a small callable is replayed


def _x(i: float = 0.0) -> torch.Tensor:
    return torch.arange(1.0, 5.0, device="cuda") + i


def _replays() -> int:
    return sum(row.replays for row in pygraph.stats())


def _reasons() -> str:
    return "; ".join(row.reason for row in pygraph.stats() if row.reason)


def test_attributes_of_a_result() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y: Any = x * 2
        y.weight = 3.0
        return y

    graphed = pygraph.graph(function)
    for i in range(_CALLS):
        y: Any = graphed(_x(i))
        assert torch.equal(y, _x(i) * 2) and y.weight == 3.0, f"call {i + 1}"


@pytest.mark.parametrize("name", ["Parameter", "Buffer"])
def test_a_new_parameter(name: str) -> None:
    class_: Any = getattr(torch.nn, name)

    def function(x: torch.Tensor) -> Any:
        return class_(x * 2, requires_grad=False) if name == "Parameter" else class_(x * 2)

    graphed = pygraph.graph(function)
    for i in range(_CALLS):
        assert isinstance(graphed(_x()), class_), f"call {i + 1}"


def test_a_parameter_that_is_passed() -> None:
    p = torch.nn.Parameter(_x(), requires_grad=False)
    graphed = pygraph.graph(lambda x, p: (p, x * p))
    for i in range(_CALLS):
        assert graphed(_x(), p)[0] is p, f"call {i + 1}"
    assert _replays() > 0, _reasons()


@pytest.mark.parametrize("kind", ["list", "dictionary"])
def test_a_container_that_is_passed(kind: str) -> None:
    x = _x()
    graphed = pygraph.graph(lambda batch: (batch, batch[0 if kind == "list" else "x"] * 2))
    for i in range(_CALLS):
        batch: Any = [x] if kind == "list" else {"x": x}
        same, y = graphed(batch)
        assert same is batch and torch.equal(y, x * 2), f"call {i + 1}"


def test_a_container_that_is_there_twice() -> None:
    def function(x: torch.Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
        metrics = {"loss": x * 2}
        return metrics, metrics

    graphed = pygraph.graph(function)
    for i in range(_CALLS):
        first, second = graphed(_x())
        assert first is second, f"call {i + 1}"


class _Metric(float):
    """A number with notes."""


def test_a_number_with_notes() -> None:
    def function(x: torch.Tensor) -> tuple[Any, torch.Tensor]:
        metric: Any = _Metric(2.0)
        metric.notes = []
        return metric, x * 2

    graphed = pygraph.graph(function)
    for i in range(_CALLS):
        metric, _ = graphed(_x())
        assert metric.notes == [], f"call {i + 1}"
        metric.notes.append(i)


@pytest.mark.parametrize("of", ["argument", "gradient"])
def test_attributes_that_a_call_gives(of: str) -> None:
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))

    def step(x: Any) -> None:
        weight.grad = None
        (weight * x).sum().backward()
        found: Any = x if of == "argument" else weight.grad
        found.is_done = True

    graphed = pygraph.graph(step)
    for i in range(_CALLS):
        graphed(x := _x(i))
        assert weight.grad is not None and torch.equal(weight.grad, x)
        assert hasattr(x if of == "argument" else weight.grad, "is_done"), f"call {i + 1}"


_SPECIAL: dict[str, Callable[[], torch.Tensor]] = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device="cuda"),
    "sparse": lambda: torch.eye(4, device="cuda").to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(_x(), 0.1, 0, torch.quint8),
    "meta": lambda: torch.ones(4, device="meta"),
    "memoryless": lambda: torch._efficientzerotensor(4, device="cuda"),
}


@pytest.mark.parametrize("is_later", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("kind", _SPECIAL)
def test_a_special_tensor_is_passed(kind: str, is_later: bool) -> None:
    """is_later: after calls with a plain tensor, which have a graph."""
    graphed, special = pygraph.graph(lambda x, other: x * 2), _SPECIAL[kind]()
    for _ in range(_CALLS if is_later else 0):
        graphed(_x(), _x())
    for i in range(8):
        assert torch.equal(graphed(_x(i), special), _x(i) * 2)
    assert f"{kind}" in _reasons()
    made = _replays()
    for i in range(_CALLS):
        assert torch.equal(graphed(_x(i), _x()), _x(i) * 2)
    assert _replays() > made


def test_an_argument_with_a_history_is_transposed_in_place() -> None:
    weight = torch.arange(6.0, device="cuda").view(2, 3).requires_grad_()

    def function(y: torch.Tensor) -> torch.Tensor:
        y.t_()
        return y * 2

    graphed, y, other = pygraph.graph(function), weight * 1, weight * 1
    with torch.no_grad():
        for i in range(_CALLS):
            got, expected = graphed(y), function(other)
            assert got.shape == expected.shape and torch.equal(got, expected), f"call {i + 1}"


def test_whether_an_argument_is_a_leaf() -> None:
    weight = torch.ones(4, device="cuda", requires_grad=True)
    computed = weight * 3
    function = lambda x: x.detach() * (2.0 if x.is_leaf else 1.0)  # noqa: E731
    graphed = pygraph.graph(function)
    with torch.no_grad():
        for x in (*[weight] * _CALLS, *[computed] * _CALLS, weight):
            assert torch.equal(graphed(x), function(x))


@pytest.mark.parametrize("name", ["storage_offset", "untyped_storage", "_base", "_version"])
def test_what_an_argument_tells(name: str) -> None:
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "storage_offset": lambda x: x + float(x.storage_offset()),
        "untyped_storage": lambda x: x + float(x.untyped_storage().nbytes()),
        "_base": lambda x: x * (2.0 if x._base is not None else 1.0),
        "_version": lambda x: x * float(x._version + 1),
    }
    function, large = functions[name], torch.arange(1024.0, device="cuda")
    graphed = pygraph.graph(function)
    for _ in range(_CALLS):
        graphed(_x())
    for part in (large[:4], large[256:260], _x().add_(0)):
        assert torch.equal(graphed(part), function(part))


def test_batches_of_a_class_are_freed() -> None:
    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor

    graphed, known = pygraph.graph(lambda batch: batch.x * 2), []
    for i in range(60):
        batch = Batch(_x(i))
        known.append(weakref.ref(batch))
        assert torch.equal(graphed(batch), batch.x * 2)
    del batch
    gc.collect()
    assert sum(of() is not None for of in known) <= 1
