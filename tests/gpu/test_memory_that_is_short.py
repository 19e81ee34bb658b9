"""Calls that find little memory beside blocks, or none."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import pygraph
from pygraph import runtime

from .held_blocks import (
    INTERNAL,
    LIMIT,
    MIB,
    PART,
    WARM_UP,
    graphs,
    holding,
    make_input,
    step,
)
from .support import assert_same, captured, compiled

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


pytestmark = pytest.mark.usefixtures("holds_memory")


def test_a_workspace_that_finds_no_memory_again_and_again_leaks_nothing() -> None:
    graphed, x = holding()
    expected = step(x)
    torch.cuda.synchronize()
    total = torch.cuda.get_device_properties(0).total_memory
    for _ in range(4):
        runtime.release_workspaces()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + PART) / total)
        with pytest.raises(torch.OutOfMemoryError):
            graphed(x)
        gc.collect()
        assert torch.cuda.memory_allocated() - before < MIB
        torch.cuda.set_per_process_memory_fraction(LIMIT / total)
        (graph,) = graphs()
        assert_same(graphed(x), expected)
        graph.hold_blocks(1 << 40, 1 << 50)
        assert_same(graphed(x), expected)


def test_a_callable_that_runs_out_of_memory_leaves_the_others() -> None:
    before = torch.cuda.memory_allocated()
    graphed, x = holding()
    expected = step(x)

    def fails(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.sin(x)] * 600).sum()  # more than the limit

    failing = pygraph.graph(fails, select="always", audit=False)
    for _ in range(4):
        with pytest.raises(torch.OutOfMemoryError):
            failing(x)
        assert_same(graphed(x), expected)
    del failing, graphed, x, expected
    pygraph.reset()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < MIB


def _call_paused(graphed: Any, model: Any, x: torch.Tensor) -> None:
    with runtime.uncaptured():
        model(x)


def _call_under_hooks(graphed: Any, model: Any, x: torch.Tensor) -> None:
    with torch.autograd.graph.save_on_cpu():
        graphed(x)


@pytest.mark.parametrize("call", [_call_paused, _call_under_hooks])
def test_each_call_that_is_not_replayed_sees_short_memory(call: Any) -> None:
    """docs/explanation/memory.md: before each call through PyGraph that is not replayed."""
    model = compiled(lambda x: torch.sin(x) * 2)
    with torch.no_grad():
        for _ in range(4):
            model(make_input())
    graphed = pygraph.graph(step, select="always", audit=False)
    x = make_input()
    for _ in range(WARM_UP):
        graphed(x)
    assert any(row.workspace_bytes >= INTERNAL for row in captured())
    torch.cuda.empty_cache()
    much = torch.empty(int(0.78 * LIMIT), dtype=torch.uint8, device="cuda")
    with torch.no_grad():
        call(graphed, model, x)
    assert not any(row.workspace_bytes >= INTERNAL for row in captured())
    del much
