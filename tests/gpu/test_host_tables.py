"""Operators that copy a table from pinned memory of their own, as reductions of lists of tensors do in
PyTorch 2.15, are in graphs. Results stay right when the memory that the graph works in moves: the
table's copy has another destination then. (PyTorch 2.11 copies no table.)"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import pygraph
from pygraph import runtime, uncapturable

from .graph_training import Training, adamw, batches, normed
from .support import assert_same, assert_used, captured, compiled, randn, refusals, uncaptured

_CALLS = 40  # at least 30 of them are replays
_SIZES = (3, 65_536, 65_537, 200_000, 1, 1000)  # parts have 65 536 elements

Tensors = Sequence[torch.Tensor]


class _Others:
    """Tensors of the program's, made between calls in memory that graphs have worked in."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def take_memory(self) -> None:
        runtime.release_workspaces()
        self._kept += [randn(size) for size in (1, 128, 300, 1000, 5000, 70_000, 300_000)]
        if len(self._kept) > 70:
            del self._kept[::3]


def _clip(*gradients: torch.Tensor) -> list[torch.Tensor]:
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return [gradient * (1.0 / (total + 1e-6)).clamp(max=1.0) for gradient in gradients] + [total]


@torch.no_grad()
def test_clipping_in_a_compiled_program() -> None:
    model = compiled(_clip)
    calls = [[randn(size) for size in _SIZES] for _ in range(_CALLS)]
    with uncaptured():
        expected = [model(*gradients) for gradients in calls]
    others, results = _Others(), []
    for gradients in calls:
        results.append(model(*gradients))
        others.take_memory()
    assert_same(results, expected)
    assert_used()
    assert len(captured()) == 1, pygraph.stats()  # with no cut
    assert captured()[0].replays >= 30, pygraph.stats()
    assert uncapturable.names() == []


@pytest.mark.parametrize("sizes", [_SIZES, (5,) * 900], ids=["large", "many"])
@pytest.mark.parametrize(
    "reduce", ["_foreach_norm", "_foreach_max", "_foreach_powsum", "norms of two types"]
)
@torch.no_grad()
def test_reductions_of_lists(reduce: str, sizes: Sequence[int]) -> None:
    def function(tensors: Tensors) -> list[torch.Tensor]:
        if reduce != "norms of two types":
            return list(getattr(torch, reduce)(tensors))
        middle = len(tensors) // 2
        halves = [tensor.bfloat16() for tensor in tensors[middle:]]
        return [*torch._foreach_norm(tensors[:middle]), *torch._foreach_norm(halves, 1)]

    if reduce.startswith("_") and not hasattr(torch, reduce):
        pytest.skip("not in this release")
    graphed, others = pygraph.graph(function), _Others()
    for _ in range(_CALLS):
        tensors = [randn(size) for size in sizes]
        assert_same(graphed(tensors), function(tensors))
        others.take_memory()
    assert refusals() == [], pygraph.stats()
    assert [row.replays >= 30 for row in captured()] == [True], pygraph.stats()


class _TwoTypes(torch.nn.Module):
    """Gradients of two types are clipped by two norms, each with a table."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(32, 4000)  # 128 000 elements
        self.second = torch.nn.Linear(4000, 10, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu().bfloat16()).float()  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", [normed, _TwoTypes])
def test_clipping_in_a_step(model: Any) -> None:
    expected, graphed = (Training(model, adamw, clips=True) for _ in range(2))
    step, others = pygraph.graph(graphed.step), _Others()
    for i, (x, y) in enumerate(batches(_CALLS)):
        assert torch.equal(step(x, y), expected.step(x, y)), (i, pygraph.stats())
        others.take_memory()
    assert_same(graphed.state(), expected.state())
    assert refusals() == [], pygraph.stats()
    assert max(row.replays for row in captured()) >= 30, pygraph.stats()


@torch.no_grad()
def test_each_stream_has_the_table() -> None:
    graphed = pygraph.graph(lambda tensors: torch._foreach_norm(tensors))
    streams = [torch.cuda.Stream() for _ in range(2)]
    for i in range(_CALLS):
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[i // 8 % 2]):
            tensors = [randn(size) for size in _SIZES]
            assert_same(list(graphed(tensors)), list(torch._foreach_norm(tensors)))
    assert refusals() == [], pygraph.stats()


@torch.no_grad()
def test_the_table_outlives_the_operators_memory() -> None:
    """Others use pinned memory after the recording."""
    graphed = pygraph.graph(lambda tensors: torch._foreach_norm(tensors))
    for _ in range(_CALLS):
        tensors = [randn(size) for size in _SIZES]
        assert_same(list(graphed(tensors)), list(torch._foreach_norm(tensors)))
        for size in (8, 64, 512, 4096):
            torch.full((size,), 0x3F, dtype=torch.uint8, pin_memory=True)
    assert refusals() == [], pygraph.stats()


@torch.no_grad()
def test_a_copy_from_the_programs_pinned_memory_is_no_table() -> None:
    """Its contents change."""
    host = torch.zeros(16, pin_memory=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + host.to("cuda", non_blocking=True)

    graphed = pygraph.graph(function)
    for i in range(12):
        torch.cuda.synchronize()
        host.fill_(i)
        x = randn(16)
        assert torch.equal(graphed(x), x + i), (i, pygraph.stats())


@torch.no_grad()
def test_what_a_replaced_kernel_copies_is_no_table() -> None:
    """A library's kernel in the place of PyTorch's copies something else, which changes."""
    factor = torch.ones(64).pin_memory()

    def norms(tensors: Tensors, order: float = 2, dtype: Any = None) -> list[torch.Tensor]:
        scale = factor.to("cuda", non_blocking=True).sum()
        return [torch.linalg.vector_norm(tensor) * scale for tensor in tensors]

    library = torch.library.Library("aten", "IMPL")
    library.impl("_foreach_norm.Scalar", norms, "CUDA")
    try:
        model = compiled(lambda x, y: [norm * 2 for norm in torch._foreach_norm([x, y])])
        tensors = randn(300), randn(70_000)
        for number in range(10):
            torch.cuda.synchronize()
            factor.fill_(number + 1.0)
            expected = [torch.linalg.vector_norm(t) * (64 * (number + 1)) * 2 for t in tensors]
            torch.testing.assert_close(model(*tensors), expected)
        assert refusals() or uncapturable.names()
    finally:
        library._destroy()
