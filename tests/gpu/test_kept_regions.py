"""Large internal memory stays with the graph of a whole function between launches, where memory is
plentiful (bindings/replay/kept_regions.h)."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph
from pygraph import runtime
from pygraph.gpu import allocator

from .support import assert_same, assert_used, at_most, compiled, randn

Function = Callable[[torch.Tensor], torch.Tensor]

_MIB = 1 << 20
_PARTS = 6
_PART = 40 * _MIB  # bytes
_INTERNAL = _PARTS * _PART  # at least; one more may be alive
_LIMIT = 64 * _INTERNAL  # of the process's memory, of which a 50th may be kept
_WARM_UP = 8


@pytest.fixture(autouse=True)
def keeps_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_KEEP_MEMORY", "1")


def _step(x: torch.Tensor) -> torch.Tensor:
    """All parts are alive at once."""
    parts = [torch.sin(x * (i + 1)) for i in range(_PARTS)]
    return torch.stack([part.amax() for part in reversed(parts)]).sum()


def _input() -> torch.Tensor:
    return randn(_PART // 4)


def _warmed_up(function: Function = _step, **options: Any) -> tuple[Any, torch.Tensor]:
    """A graphed function whose graph has kept memory, and an input."""
    graphed = pygraph.graph(function, select="always", audit=False, **options)
    x = _input()
    for _ in range(_WARM_UP):
        graphed(x)
    assert_used()
    return graphed, x


def _statistic(name: str) -> int:
    return int(torch.cuda.memory_stats()[name])


def _allocations(call: Callable[[], object]) -> int:
    before = _statistic("allocation.all.allocated")
    call()
    return _statistic("allocation.all.allocated") - before


def test_a_launch_finds_what_the_last_one_used() -> None:
    before = torch.cuda.memory_allocated()
    graphed, x = _warmed_up()
    assert torch.cuda.memory_allocated() - before >= _INTERNAL
    assert _allocations(lambda: graphed(x)) == 1  # the result
    for _ in range(3):
        y = _input()
        assert_same(graphed(y), _step(y))


def test_nothing_is_kept_once_memory_is_short() -> None:
    with at_most(_LIMIT):
        before = torch.cuda.memory_allocated()
        graphed, x = _warmed_up()
        expected = _step(x)
        assert torch.cuda.memory_allocated() - before >= _INTERNAL
        much = torch.empty(int(0.76 * _LIMIT), dtype=torch.uint8, device="cuda")
        for _ in range(40):
            graphed(x)
        assert torch.cuda.memory_allocated() - before - much.nbytes < 2 * _PART
        del much
        torch.cuda.empty_cache()
        for _ in range(40):
            assert_same(graphed(x), expected)
        assert torch.cuda.memory_allocated() - before < 2 * _PART  # for good


def test_nothing_is_kept_where_memory_was_short() -> None:
    with at_most(_LIMIT):
        before = torch.cuda.memory_allocated()
        much = torch.empty(int(0.76 * _LIMIT), dtype=torch.uint8, device="cuda")
        graphed, x = _warmed_up()
        assert torch.cuda.memory_allocated() - before - much.nbytes < 2 * _PART
        assert _allocations(lambda: graphed(x)) >= 1 + _PARTS


def test_a_program_that_keeps_tensors_has_its_numbers() -> None:
    graphed, x = _warmed_up()
    expected = _step(x)
    torch.cuda.empty_cache()
    kept: list[torch.Tensor] = []
    for i in range(20):
        assert_same(graphed(x), expected)
        kept.append(torch.full((3 * _MIB * (i % 4 + 1),), float(i), device="cuda"))
        if i % 5 == 4:
            kept = kept[1::2]
        assert all((tensor == tensor[0]).all() for tensor in kept)


def test_recordings_find_it_free() -> None:
    first, x = _warmed_up()
    held = torch.cuda.memory_allocated()
    allocator.give_back_all()
    assert held - torch.cuda.memory_allocated() >= _INTERNAL
    assert_same(first(x), _step(x))
    assert torch.cuda.memory_allocated() == held


def test_it_is_given_up_with_the_workspace() -> None:
    graphed, x = _warmed_up()
    held = torch.cuda.memory_allocated()
    runtime.release_workspaces()
    assert held - torch.cuda.memory_allocated() >= _INTERNAL
    assert_same(graphed(x), _step(x))


def test_it_goes_with_its_graph() -> None:
    before = torch.cuda.memory_allocated()
    graphed, x = _warmed_up()
    del graphed, x
    pygraph.reset()
    gc.collect()
    assert torch.cuda.memory_allocated() - before < _PART


def test_streams_in_turn() -> None:
    graphed, x = _warmed_up()
    expected = _step(x)
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
    with torch.cuda.stream(side):  # the program stays there
        graphed(x)
        assert _allocations(lambda: graphed(x)) == 1
    torch.cuda.synchronize()


def test_threads() -> None:
    graphed, x = _warmed_up()
    expected = _step(x)
    torch.cuda.synchronize()
    wrong: list[int] = []

    def run(index: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream if index % 2 else torch.cuda.default_stream()):
            for i in range(20):
                result = graphed(x)
                other = torch.full((_PART // 4 * (index % 3 + 1),), float(i), device="cuda")
                if not torch.equal(result, expected) or not bool((other == i).all()):
                    wrong.append(i)
                if i % 7 == 0:
                    torch.cuda.empty_cache()

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_beside_a_capture_of_the_program() -> None:
    graphed, x = _warmed_up()
    expected = _step(x)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        y = torch.sin(x)
    captured.replay()
    assert_same(graphed(x), expected)
    captured.replay()
    assert_same(y, torch.sin(x))


def test_it_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYGRAPH_KEEP_MEMORY")
    before = torch.cuda.memory_allocated()
    graphed, x = _warmed_up()
    assert _allocations(lambda: graphed(x)) >= 1 + _PARTS
    assert torch.cuda.memory_allocated() - before < 2 * _PART


def test_a_large_part_of_what_the_process_may_take_is_not_kept() -> None:
    with at_most(40 * _INTERNAL):
        before = torch.cuda.memory_allocated()
        graphed, x = _warmed_up()
        assert torch.cuda.memory_allocated() - before < 2 * _PART
        assert _allocations(lambda: graphed(x)) >= 1 + _PARTS


def test_compiled_programs_keep_nothing() -> None:
    before = torch.cuda.memory_allocated()
    model = compiled(
        lambda x: torch.cumsum(torch.cumsum(x.view(-1, 64), 0), 1).sum(),
        options={"pygraph.select": "always"},
    )
    x = torch.ones(_PART // 4, device="cuda")
    for _ in range(_WARM_UP):
        model(x)
    assert_used()
    runtime.engine().free_blas_workspaces()
    assert torch.cuda.memory_allocated() - before < 2 * _PART


@pytest.mark.parametrize("audit", [1, 3])
def test_audits(audit: int) -> None:
    graphed = pygraph.graph(_step, select="always", audit=audit)
    x = _input()
    expected = _step(x)
    for _ in range(12):
        assert_same(graphed(x), expected)
    assert_used()
    (row,) = pygraph.stats()
    assert row.audits > 0 and row.audits_failed == 0


@pytest.mark.parametrize("history", [False, True])
def test_two_threads_that_allocate(history: bool) -> None:
    graphed, x = _warmed_up()
    expected = _step(x)
    failures: list[BaseException] = []

    def replay() -> None:
        try:
            for i in range(60):
                assert_same(graphed(x), expected)
                torch.empty(_INTERNAL * (i % 3 + 1), dtype=torch.uint8, device="cuda")
        except BaseException as error:
            failures.append(error)

    def free() -> None:
        for i in range(300):
            torch.empty(_MIB * (1 + i % 50), dtype=torch.uint8, device="cuda")
            torch.cuda.memory_stats()
            if i % 20 == 0:
                allocator.give_back_all()

    if history:
        torch.cuda.memory._record_memory_history()
    try:
        threads = [threading.Thread(target=target, daemon=True) for target in (replay, free)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
    finally:
        if history:
            torch.cuda.memory._record_memory_history(enabled=None)
    assert failures == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_graph_on_another_device_than_the_current_one() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return _step(x) + 1

    graphed = pygraph.graph(step, select="always", audit=False)
    x = torch.randn(_PART // 4, device="cuda:1")
    before = torch.cuda.memory_allocated(1)
    elsewhere = torch.cuda.memory_allocated(0)
    for _ in range(_WARM_UP):
        result = graphed(x)
    assert_used()
    assert torch.cuda.memory_allocated(1) - before >= _INTERNAL
    assert torch.cuda.memory_allocated(0) == elsewhere
    assert_same(result, step(x))
