"""Versions of what a call writes, as a later backward of the program sees them. Replays here
count nothing by themselves, as those of graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph

from .attacked import X, replays

_LIBRARY = torch.library.Library("counted_versions", "DEF")
_LIBRARY.define("write(Tensor(a!) to, Tensor x) -> ()")


def _write(to: torch.Tensor, x: torch.Tensor) -> None:
    to.data.mul_(0.5).add_(x)


_LIBRARY.impl("write", _write, "CPU")
torch.library.register_fake("counted_versions::write", lambda to, x: None)
_WRITE = torch.ops.counted_versions.write.default  # held: see test_operators_of_libraries.py


def _raises_in_a_backward(call: Callable[..., Any], at: torch.Tensor) -> bool:
    """Whether autograd notices that the call has written to what a product has saved."""
    p = torch.ones(4, requires_grad=True)
    product = (p * at).sum()
    with torch.no_grad():
        call(X)
    try:
        product.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return True
    return False


def _assert_noticed(partitions: Any, call: Callable[..., Any], at: torch.Tensor) -> None:
    assert _raises_in_a_backward(call, at)
    graphed = pygraph.graph(call)
    with torch.no_grad():
        for _ in range(8):
            graphed(X)
    before = replays(partitions)
    noticed = _raises_in_a_backward(graphed, at)
    assert replays(partitions) == before + 1
    assert noticed, "a replay has written to it, and autograd was not told"


def test_what_was_told_before_an_operator_sees_the_tensor(partitions: Any) -> None:
    """The write is one of an operator that does not count, as those of libraries in C++ do not."""
    at = torch.zeros(4)

    def call(x: torch.Tensor) -> torch.Tensor:
        torch.autograd.graph.increment_version(at)
        torch.ops.counted_versions.write(at, x)
        return at + x

    _assert_noticed(partitions, call, at)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_program_with_an_operator_of_a_library(partitions: Any) -> None:
    """Compiled programs tell autograd first, then run."""
    at = torch.zeros(4)

    @torch.compile
    def call(x: torch.Tensor) -> torch.Tensor:
        torch.ops.counted_versions.write(at, x)
        return at + x

    _assert_noticed(partitions, call, at)


def test_what_was_told_before_a_write_through_an_alias(partitions: Any) -> None:
    at = torch.zeros(4)
    alias = at.data

    def call(x: torch.Tensor) -> torch.Tensor:
        torch.autograd.graph.increment_version(at)  # of a kernel that is no operator
        result = at + x
        alias.add_(1)
        return result

    _assert_noticed(partitions, call, at)
