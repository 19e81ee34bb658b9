"""The graph of a whole function holds its blocks, the large internal memory that its launches else
allocate, where memory is plentiful (bindings/replay/held_blocks.h)."""

from __future__ import annotations

import functools

import pytest
import torch

import pygraph
from pygraph import runtime
from pygraph.gpu import allocator

from .held_blocks import (
    INTERNAL,
    MIB,
    PART,
    PARTS,
    WARM_UP,
    allocations,
    at_the_same_time,
    holding,
    is_held,
    make_input,
    other_step,
    step,
    warmed_up,
)
from .support import assert_same, assert_used, captured, compiled

pytestmark = pytest.mark.usefixtures("holds_memory")


def test_a_launch_allocates_nothing_but_its_result() -> None:
    graphed, x = holding()
    assert allocations(lambda: graphed(x)) == 1
    for _ in range(3):
        y = make_input()
        assert_same(graphed(y), step(y))


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_HOLD_MEMORY", "0")
    before = torch.cuda.memory_allocated()
    graphed, x = warmed_up()
    assert not is_held()
    assert allocations(lambda: graphed(x)) >= 1 + PARTS
    assert torch.cuda.memory_allocated() - before < 2 * PART


def test_the_graphs_of_a_stream_share_the_memory() -> None:
    before = torch.cuda.memory_allocated()
    first, x = holding()
    alone = torch.cuda.memory_allocated() - before
    second, y = warmed_up(other_step)
    assert is_held()
    assert torch.cuda.memory_allocated() - before < alone + 2 * PART
    for _ in range(3):
        results = first(x), second(y), first(y), second(x)
        assert_same(results, (step(x), other_step(y), step(y), other_step(x)))


def test_a_program_that_moves_to_another_stream_leaves_nothing_behind() -> None:
    before = torch.cuda.memory_allocated()
    graphed, x = holding()
    expected = step(x)
    side = torch.cuda.Stream()
    for _ in range(4):
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            there = graphed(x)
            there.record_stream(side)
        here = graphed(x)
        torch.cuda.default_stream().wait_stream(side)
        assert_same(there, expected)
        assert_same(here, expected)
    torch.cuda.synchronize()
    assert not is_held()
    del there, here
    assert torch.cuda.memory_allocated() - before < 2 * PART


def test_a_program_that_keeps_tensors_has_its_numbers() -> None:
    graphed, x = holding()
    expected = step(x)
    torch.cuda.empty_cache()
    kept: list[torch.Tensor] = []
    for i in range(20):
        assert_same(graphed(x), expected)
        kept.append(torch.full((3 * MIB * (i % 4 + 1),), float(i), device="cuda"))
        if i % 5 == 4:
            kept = kept[1::2]
        if i == 12:
            runtime.engine().drop_blocks(0)
        assert all((tensor == tensor[0]).all() for tensor in kept)


def test_threads() -> None:
    graphed, x = holding()
    expected = step(x)
    torch.cuda.synchronize()

    def run(index: int) -> None:
        stream = torch.cuda.Stream() if index % 2 else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            for i in range(20):
                result = graphed(x)
                other = torch.full((PART // 4 * (index % 3 + 1),), float(i), device="cuda")
                assert torch.equal(result, expected) and bool((other == i).all())
                if i % 7 == 0:
                    torch.cuda.empty_cache()

    at_the_same_time(*(functools.partial(run, index) for index in range(4)))


@pytest.mark.parametrize("history", [False, True])
def test_threads_that_allocate_and_drop(history: bool) -> None:
    graphed, x = holding()
    expected = step(x)

    def replay() -> None:
        for i in range(60):
            assert_same(graphed(x), expected)
            torch.empty(INTERNAL * (i % 3 + 1), dtype=torch.uint8, device="cuda")

    def drop() -> None:
        for i in range(300):
            torch.empty(MIB * (1 + i % 50), dtype=torch.uint8, device="cuda")
            torch.cuda.memory_stats()
            if i % 20 == 0:
                allocator.give_back_all()
            if i == 150:
                allocator.drop_blocks(0)

    if history:
        torch.cuda.memory._record_memory_history()
    try:
        at_the_same_time(replay, drop)
    finally:
        if history:
            torch.cuda.memory._record_memory_history(enabled=None)
    assert not is_held()


def test_beside_a_capture_of_the_program() -> None:
    graphed, x = holding()
    expected = step(x)
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        y = torch.sin(x)
    made.replay()
    for _ in range(3):
        assert_same(graphed(x), expected)
        made.replay()
    assert_same(y, torch.sin(x))


def test_compiled_programs_hold_nothing() -> None:
    model = compiled(
        lambda x: torch.cumsum(torch.cumsum(x.view(-1, 64), 0), 1).sum(),
        options={"pygraph.select": "always"},
    )
    x = torch.ones(PART // 4, device="cuda")
    for _ in range(WARM_UP):
        model(x)
    assert_used()
    assert all(row.block_bytes >= PART for row in captured())


@pytest.mark.parametrize("audit", [1, 3])
def test_audits(audit: int) -> None:
    graphed = pygraph.graph(step, select="always", audit=audit)
    x = make_input()
    expected = step(x)
    for _ in range(12):
        assert_same(graphed(x), expected)
    assert_used()
    assert is_held()
    (row,) = pygraph.stats()
    assert row.audits > 0 and row.audits_failed == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_graph_on_another_device_than_the_current_one() -> None:
    graphed = pygraph.graph(other_step, select="always", audit=False)
    x = make_input("cuda:1")
    before = torch.cuda.memory_allocated(1)
    elsewhere = torch.cuda.memory_allocated(0)
    for _ in range(WARM_UP):
        result = graphed(x)
    assert_used()
    assert is_held()
    runtime.engine().drop_blocks(0)
    assert is_held()
    assert torch.cuda.memory_allocated(1) - before >= INTERNAL
    assert torch.cuda.memory_allocated(0) <= elsewhere
    assert_same(result, other_step(x))
