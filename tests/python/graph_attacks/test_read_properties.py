"""Callables that ask tensors for more than the signature of a graph has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph

from .attacked import X, replays

_LARGE = torch.arange(16.0)
_PARTS = (_LARGE[:4], _LARGE[4:8], _LARGE.view(4, 4)[2], X.clone())
_READING: dict[str, Callable[[Any], Any]] = {
    "storage_offset": lambda x: x + float(x.storage_offset()),
    "untyped_storage": lambda x: x + float(x.untyped_storage().nbytes()),
    "_base": lambda x: x * (2.0 if x._base is not None else 1.0),
    "_is_view": lambda x: x * (2.0 if x._is_view() else 1.0),
    "_version": lambda x: x * float(x._version + 1),
    "getattr": lambda x: x * float(getattr(x, "_version") + 1),  # noqa: B009
}


@pytest.mark.parametrize("name", _READING)
def test_of_arguments(partitions: Any, name: str) -> None:
    graphed, function = pygraph.graph(_READING[name]), _READING[name]
    for _ in range(12):
        graphed(X)
    for part in (*_PARTS, X.clone().add_(0)):
        assert torch.equal(graphed(part), function(part))
    assert any(f"reads {name}" in row.reason or name == "getattr" for row in pygraph.stats())


def test_of_what_it_reaches(partitions: Any) -> None:
    weight = torch.ones(4)
    graphed = pygraph.graph(lambda x: x * float(weight._version + 1))
    for i in range(12):
        assert torch.equal(graphed(X), X * float(i + 1))
        weight.add_(0)


class _Module(torch.nn.Module):
    """Attributes of these names are its own."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self._base = 3.0

    def forward(self, x: Any) -> Any:
        return x * self._base * self._version


def test_attributes_of_the_programs_objects(partitions: Any) -> None:
    module = _Module()
    graphed = pygraph.graph(module)
    for _ in range(12):
        assert torch.equal(graphed(X), X * 6)
    assert replays(partitions) > 0


def test_code_of_libraries(partitions: Any) -> None:
    """PyTorch's own code may name them: optimizers do."""
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([p], fused=True)

    def f(x: Any) -> None:
        optimizer.zero_grad()
        (p * x).sum().backward()
        optimizer.step()

    graphed = pygraph.graph(f)
    for _ in range(12):
        graphed(X)
    assert replays(partitions) > 0


def test_texts_of_these_names(partitions: Any) -> None:
    sizes = {"_base": 2.0}
    graphed = pygraph.graph(lambda x: x * sizes["_base"])
    for _ in range(12):
        assert torch.equal(graphed(X), X * 2)
    assert replays(partitions) > 0
