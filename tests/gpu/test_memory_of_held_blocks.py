"""Which memory held blocks take, and when they are dropped (docs/decisions/0037)."""

from __future__ import annotations

import gc

import pytest
import torch

import pygraph
from pygraph import runtime
from pygraph.gpu import allocator
from pygraph.record import owned_memory

from .held_blocks import (
    CALLS_TO_SEE,
    INTERNAL,
    LIMIT,
    MIB,
    PART,
    PARTS,
    Function,
    allocations,
    holding,
    is_held,
    other_step,
    step,
    warmed_up,
)
from .support import assert_same, captured, randn

pytestmark = pytest.mark.usefixtures("holds_memory")


def test_blocks_do_not_lie_in_the_pieces_of_other_tensors() -> None:
    """Such a piece could not be used for a tensor of its size, or released."""
    size = 2 * INTERNAL - PART  # what is left of the segment when the input was cut from it
    much = torch.empty(size + PART, dtype=torch.uint8, device="cuda")
    reserved = torch.cuda.memory_reserved()
    del much
    graphed, x = holding()
    for i in range(4):
        much = torch.empty(size, dtype=torch.uint8, device="cuda")
        del much
        graphed(x)
        if i == 1:
            runtime.release_workspaces()  # the next launch takes it again
    assert torch.cuda.memory_reserved() - reserved < INTERNAL + 3 * PART


def test_nothing_is_held_once_memory_is_short() -> None:
    before = torch.cuda.memory_allocated()
    graphed, x = holding()
    expected = step(x)
    much = torch.empty(int(0.76 * LIMIT), dtype=torch.uint8, device="cuda")
    for _ in range(CALLS_TO_SEE):
        graphed(x)
    assert not is_held()
    assert torch.cuda.memory_allocated() - before - much.nbytes < 2 * PART
    del much
    torch.cuda.empty_cache()
    for _ in range(CALLS_TO_SEE):
        assert_same(graphed(x), expected)
    assert not is_held()  # for good
    assert torch.cuda.memory_allocated() - before < 2 * PART


def test_a_graph_that_sees_short_memory_drops_the_blocks_of_idle_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(allocator, "_HELD_SHARE", 0.05)  # room for those of two streams
    before = torch.cuda.memory_allocated()
    idle, x = holding()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graphed, y = warmed_up(other_step)
        assert is_held()
        assert torch.cuda.memory_allocated() - before >= 2 * INTERNAL
        stream.synchronize()
        much = torch.empty(int(0.76 * LIMIT), dtype=torch.uint8, device="cuda")
        for _ in range(CALLS_TO_SEE):
            graphed(y)
        assert not is_held()
        assert torch.cuda.memory_allocated() - before - much.nbytes < 3 * PART
    torch.cuda.synchronize()
    assert_same(idle(x), step(x))


def test_nothing_is_held_where_memory_was_short() -> None:
    much = torch.empty(int(0.76 * LIMIT), dtype=torch.uint8, device="cuda")
    graphed, x = warmed_up()
    assert not is_held()
    assert allocations(lambda: graphed(x)) >= 1 + PARTS
    del much


def test_a_large_part_of_what_the_process_may_take_is_not_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(allocator, "_HELD_SHARE", 0.01)
    graphed, x = warmed_up()
    assert not is_held()
    assert allocations(lambda: graphed(x)) >= 1 + PARTS


def test_streams_together_hold_no_more_than_one_may() -> None:
    first, x = holding()
    with torch.cuda.stream(torch.cuda.Stream()):
        second, y = warmed_up(other_step)
        assert {row.block_bytes == 0 for row in captured()} == {False, True}
        assert_same(second(y), other_step(y))
    torch.cuda.synchronize()
    assert_same(first(x), step(x))


def test_dropped_blocks() -> None:
    before = torch.cuda.memory_allocated()
    graphed, x = holding()
    runtime.engine().drop_blocks(0)
    assert not is_held()
    assert torch.cuda.memory_allocated() - before < 2 * PART
    for _ in range(3):
        assert_same(graphed(x), step(x))
    assert torch.cuda.memory_allocated() - before < 2 * PART


def test_they_are_released_with_the_workspace() -> None:
    graphed, x = holding()
    held = torch.cuda.memory_allocated()
    runtime.release_workspaces()
    assert held - torch.cuda.memory_allocated() >= INTERNAL
    assert_same(graphed(x), step(x))
    assert torch.cuda.memory_allocated() == held


def test_they_go_with_their_graph() -> None:
    before = torch.cuda.memory_allocated()
    graphed, x = holding()
    del graphed, x
    pygraph.reset()
    gc.collect()
    assert torch.cuda.memory_allocated() - before < PART


@pytest.mark.parametrize("holds", [True, False])
def test_a_workspace_that_is_allocated_again_lies_in_no_piece_of_the_program(
    holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYGRAPH_HOLD_MEMORY", str(int(holds)))
    monkeypatch.setattr(allocator, "_HELD_SHARE", 0.05)
    larger, x = warmed_up(lambda x: step(torch.cat([x, x[: 5 * MIB]])))
    graphed, _ = warmed_up()
    assert is_held() == holds
    expected = step(x)
    before = torch.cuda.memory_allocated()
    del larger  # and with it, the workspace
    gc.collect()
    assert not holds or before - torch.cuda.memory_allocated() >= INTERNAL
    torch.cuda.empty_cache()
    size = int(0.7 * LIMIT)
    for _ in range(3):
        much = torch.empty(size, dtype=torch.uint8, device="cuda")
        del much
        assert_same(graphed(x), expected)


def _take_all_but(room: int) -> torch.Tensor:
    """What is held counts as free: uncaptured, the process would have it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = max((row.workspace_bytes for row in captured() if row.block_bytes == 0), default=0)
    size = LIMIT - (torch.cuda.memory_reserved() - held) - room
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def _needed(function: Function, x: torch.Tensor) -> int:
    """Bytes at the peak of an uncaptured call."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function(x)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("calls", [0, 3])
def test_calls_that_are_not_replayed_find_the_memory(calls: int) -> None:
    """Of a new size."""
    graphed, x = holding()
    y = randn(2 * PART // 4)
    expected, needed = step(y), _needed(step, y)
    for _ in range(calls):
        graphed(y)
    much = _take_all_but(needed + 3 * PART)
    for _ in range(4):
        assert_same(graphed(y), expected)
    assert_same(graphed(x), step(x))
    del much


def test_uncaptured_calls_of_a_trial_find_the_memory() -> None:
    graphed, x = holding()
    y = randn(2 * PART // 4)
    expected, needed = other_step(y), _needed(other_step, y)
    tried = pygraph.graph(other_step, select="auto", audit=False)
    for _ in range(20):
        tried(y)
        if any(row.state == "measuring" for row in pygraph.stats()):
            break
    assert any(row.state == "measuring" for row in pygraph.stats()), pygraph.stats()
    much = _take_all_but(needed + 3 * PART)
    for _ in range(4):
        assert_same(tried(y), expected)
    del much
    assert_same(graphed(x), step(x))


@pytest.mark.xfail(strict=True, reason="docs/roadmap.md: held blocks")
def test_a_limit_that_is_lowered_later_is_seen() -> None:
    graphed, x = holding()
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + INTERNAL
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit / total)  # at_most() sets it back
    for _ in range(CALLS_TO_SEE):
        graphed(x)
    assert not is_held()


@pytest.mark.xfail(strict=True, reason="docs/roadmap.md: memory pools")
def test_a_pool_of_the_program_holds_no_blocks() -> None:
    graphed, x = holding()
    pool = torch.cuda.MemPool()
    runtime.release_workspaces()
    with torch.cuda.use_mem_pool(pool):
        result = graphed(x)
    # Not pool.snapshot(): PyTorch 2.11's drops references that it does not have.
    active = sum(size for _, size in owned_memory.still_held(pool))
    runtime.release_workspaces()  # before the pool goes
    del result
    assert active < PART
