"""Internal memory that each launch of a whole step allocates lies in a few blocks
(bindings/replay/memory_plan.h)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import pygraph

from .support import assert_same, assert_used, randn

_MIB = 1 << 20
_WARM_UP = 6


def _sum_of_products(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """All products are alive at once, and one factor."""

    def step(x: torch.Tensor) -> torch.Tensor:
        products = [torch.cumsum(x * (i + 1), 0) for i in range(count)]
        return torch.stack([product.amax() for product in reversed(products)]).sum()

    return step


def _allocations(call: Callable[[], object]) -> int:
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()
    return int(torch.cuda.memory_stats()["allocation.all.allocated"] - before)


@pytest.mark.parametrize(
    ("mib", "count", "blocks"), [(40, 6, 1), (100, 7, 2), (600, 2, 3)], ids=lambda value: str(value)
)
def test_regions_share_blocks_of_half_a_gibibyte(mib: int, count: int, blocks: int) -> None:
    step = _sum_of_products(count)
    graphed = pygraph.graph(step, select="always")
    inputs = [randn(mib * _MIB // 4) for _ in range(2)]
    for i in range(_WARM_UP):
        graphed(inputs[i % 2])
    assert_used()
    assert _allocations(lambda: graphed(inputs[0])) == blocks + 1  # the result
    for x in inputs:
        assert_same(graphed(x), step(x))


def test_a_tensor_that_is_cut_from_a_free_block_stays_as_it_is() -> None:
    step = _sum_of_products(6)
    graphed = pygraph.graph(step, select="always", audit=3)
    x = randn(10 * _MIB)
    for _ in range(_WARM_UP):
        graphed(x)
    expected = step(x)
    torch.cuda.empty_cache()
    kept: list[torch.Tensor] = []
    for i in range(20):
        assert_same(graphed(x), expected)
        kept.append(torch.full((3 * _MIB,), float(i), device="cuda"))
        if i % 5 == 4:
            kept = kept[1::2]
        assert all((tensor == tensor[0]).all() for tensor in kept)
    assert_used()


def test_memory_returns_between_launches() -> None:
    graphed = pygraph.graph(_sum_of_products(6), select="always")
    x = randn(10 * _MIB)
    for _ in range(_WARM_UP):
        graphed(x)
    before = torch.cuda.memory_allocated()
    results = [graphed(x) for _ in range(3)]
    assert torch.cuda.memory_allocated() - before < _MIB
    assert len(results) == 3
