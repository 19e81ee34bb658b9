"""The graph of a whole function holds its blocks, the large internal memory that its launches else
allocate, where memory is plentiful (bindings/replay/held_blocks.h)."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import pygraph
from pygraph import runtime
from pygraph.gpu import allocator

from .support import assert_same, assert_used, at_most, captured, compiled, randn

Function = Callable[[torch.Tensor], torch.Tensor]

_MIB = 1 << 20
_PARTS = 6
_PART = 40 * _MIB  # bytes
_INTERNAL = _PARTS * _PART  # at least; one more may be alive
_LIMIT = 64 * _INTERNAL  # of the process's memory, of which a 50th may be held
_WARM_UP = 8
_CALLS_TO_SEE = 40  # enough to see that memory is short


@pytest.fixture(autouse=True)
def holds_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("PYGRAPH_HOLD_MEMORY", raising=False)
    with at_most(_LIMIT):
        yield


def _step(x: torch.Tensor) -> torch.Tensor:
    """All parts are alive at once."""
    parts = [torch.sin(x * (i + 1)) for i in range(_PARTS)]
    return torch.stack([part.amax() for part in reversed(parts)]).sum()


def _other_step(x: torch.Tensor) -> torch.Tensor:
    return _step(x) * 2


def _input(device: str = "cuda") -> torch.Tensor:
    return randn(_PART // 4).to(device)


def _warmed_up(function: Function = _step, **options: Any) -> tuple[Any, torch.Tensor]:
    """A graphed function with a graph that is in use, and an input."""
    graphed = pygraph.graph(function, select="always", audit=False, **options)
    x = _input()
    for _ in range(_WARM_UP):
        graphed(x)
    assert_used()
    return graphed, x


def _holding(function: Function = _step) -> tuple[Any, torch.Tensor]:
    """As :func:`_warmed_up`, with a graph that holds its blocks."""
    before = torch.cuda.memory_allocated()
    graphed, x = _warmed_up(function)
    assert _is_held()
    assert torch.cuda.memory_allocated() - before >= _INTERNAL
    return graphed, x


def _is_held() -> bool:
    """Whether all graphs hold their blocks. Else none does."""
    (blocks,) = {row.block_bytes == 0 for row in captured()}
    (is_large,) = {row.workspace_bytes >= _INTERNAL for row in captured()}
    assert blocks == is_large
    return blocks


def _allocations(call: Callable[[], object]) -> int:
    """Of blocks and results: all but small ones are asked for one by one."""
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()
    return int(torch.cuda.memory_stats()["allocation.all.allocated"] - before)


def _at_the_same_time(*targets: Callable[[], None]) -> None:
    """Raises what one of them has raised, or if one does not end."""
    failures: list[BaseException] = []

    def run(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    for failure in failures:
        raise failure


def test_a_launch_allocates_nothing_but_its_result() -> None:
    graphed, x = _holding()
    assert _allocations(lambda: graphed(x)) == 1
    for _ in range(3):
        y = _input()
        assert_same(graphed(y), _step(y))


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_HOLD_MEMORY", "0")
    before = torch.cuda.memory_allocated()
    graphed, x = _warmed_up()
    assert not _is_held()
    assert _allocations(lambda: graphed(x)) >= 1 + _PARTS
    assert torch.cuda.memory_allocated() - before < 2 * _PART


def test_the_graphs_of_a_stream_share_the_memory() -> None:
    before = torch.cuda.memory_allocated()
    first, x = _holding()
    alone = torch.cuda.memory_allocated() - before
    second, y = _warmed_up(_other_step)
    assert _is_held()
    assert torch.cuda.memory_allocated() - before < alone + 2 * _PART
    for _ in range(3):
        results = first(x), second(y), first(y), second(x)
        assert_same(results, (_step(x), _other_step(y), _step(y), _other_step(x)))


def test_blocks_do_not_lie_in_the_pieces_of_other_tensors() -> None:
    """Such a piece could not be used for a tensor of its size, or released."""
    size = 2 * _INTERNAL - _PART  # what is left of the segment when the input was cut from it
    much = torch.empty(size + _PART, dtype=torch.uint8, device="cuda")
    reserved = torch.cuda.memory_reserved()
    del much
    graphed, x = _holding()
    for i in range(4):
        much = torch.empty(size, dtype=torch.uint8, device="cuda")
        del much
        graphed(x)
        if i == 1:
            runtime.release_workspaces()  # the next launch takes it again
    assert torch.cuda.memory_reserved() - reserved < _INTERNAL + 3 * _PART


def test_nothing_is_held_once_memory_is_short() -> None:
    before = torch.cuda.memory_allocated()
    graphed, x = _holding()
    expected = _step(x)
    much = torch.empty(int(0.76 * _LIMIT), dtype=torch.uint8, device="cuda")
    for _ in range(_CALLS_TO_SEE):
        graphed(x)
    assert not _is_held()
    assert torch.cuda.memory_allocated() - before - much.nbytes < 2 * _PART
    del much
    torch.cuda.empty_cache()
    for _ in range(_CALLS_TO_SEE):
        assert_same(graphed(x), expected)
    assert not _is_held()  # for good
    assert torch.cuda.memory_allocated() - before < 2 * _PART


def test_a_graph_that_sees_short_memory_drops_the_blocks_of_idle_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(allocator, "_HELD_SHARE", 0.05)  # room for those of two streams
    before = torch.cuda.memory_allocated()
    idle, x = _holding()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graphed, y = _warmed_up(_other_step)
        assert _is_held()
        assert torch.cuda.memory_allocated() - before >= 2 * _INTERNAL
        stream.synchronize()
        much = torch.empty(int(0.76 * _LIMIT), dtype=torch.uint8, device="cuda")
        for _ in range(_CALLS_TO_SEE):
            graphed(y)
        assert not _is_held()
        assert torch.cuda.memory_allocated() - before - much.nbytes < 3 * _PART
    torch.cuda.synchronize()
    assert_same(idle(x), _step(x))


def test_nothing_is_held_where_memory_was_short() -> None:
    much = torch.empty(int(0.76 * _LIMIT), dtype=torch.uint8, device="cuda")
    graphed, x = _warmed_up()
    assert not _is_held()
    assert _allocations(lambda: graphed(x)) >= 1 + _PARTS
    del much


def test_a_large_part_of_what_the_process_may_take_is_not_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(allocator, "_HELD_SHARE", 0.01)
    graphed, x = _warmed_up()
    assert not _is_held()
    assert _allocations(lambda: graphed(x)) >= 1 + _PARTS


def test_streams_together_hold_no_more_than_one_may() -> None:
    first, x = _holding()
    with torch.cuda.stream(torch.cuda.Stream()):
        second, y = _warmed_up(_other_step)
        assert {row.block_bytes == 0 for row in captured()} == {False, True}
        assert_same(second(y), _other_step(y))
    torch.cuda.synchronize()
    assert_same(first(x), _step(x))


def test_dropped_blocks() -> None:
    before = torch.cuda.memory_allocated()
    graphed, x = _holding()
    runtime.engine().drop_blocks(0)
    assert not _is_held()
    assert torch.cuda.memory_allocated() - before < 2 * _PART
    for _ in range(3):
        assert_same(graphed(x), _step(x))
    assert torch.cuda.memory_allocated() - before < 2 * _PART


def test_they_are_released_with_the_workspace() -> None:
    graphed, x = _holding()
    held = torch.cuda.memory_allocated()
    runtime.release_workspaces()
    assert held - torch.cuda.memory_allocated() >= _INTERNAL
    assert_same(graphed(x), _step(x))
    assert torch.cuda.memory_allocated() == held


def test_they_go_with_their_graph() -> None:
    before = torch.cuda.memory_allocated()
    graphed, x = _holding()
    del graphed, x
    pygraph.reset()
    gc.collect()
    assert torch.cuda.memory_allocated() - before < _PART


def test_a_program_that_moves_to_another_stream_leaves_nothing_behind() -> None:
    before = torch.cuda.memory_allocated()
    graphed, x = _holding()
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
    torch.cuda.synchronize()
    assert not _is_held()
    del there, here
    assert torch.cuda.memory_allocated() - before < 2 * _PART


def test_a_program_that_keeps_tensors_has_its_numbers() -> None:
    graphed, x = _holding()
    expected = _step(x)
    torch.cuda.empty_cache()
    kept: list[torch.Tensor] = []
    for i in range(20):
        assert_same(graphed(x), expected)
        kept.append(torch.full((3 * _MIB * (i % 4 + 1),), float(i), device="cuda"))
        if i % 5 == 4:
            kept = kept[1::2]
        if i == 12:
            runtime.engine().drop_blocks(0)
        assert all((tensor == tensor[0]).all() for tensor in kept)


def test_threads() -> None:
    graphed, x = _holding()
    expected = _step(x)
    torch.cuda.synchronize()

    def run(index: int) -> None:
        stream = torch.cuda.Stream() if index % 2 else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            for i in range(20):
                result = graphed(x)
                other = torch.full((_PART // 4 * (index % 3 + 1),), float(i), device="cuda")
                assert torch.equal(result, expected) and bool((other == i).all())
                if i % 7 == 0:
                    torch.cuda.empty_cache()

    _at_the_same_time(*(functools.partial(run, index) for index in range(4)))


@pytest.mark.parametrize("history", [False, True])
def test_threads_that_allocate_and_drop(history: bool) -> None:
    graphed, x = _holding()
    expected = _step(x)

    def replay() -> None:
        for i in range(60):
            assert_same(graphed(x), expected)
            torch.empty(_INTERNAL * (i % 3 + 1), dtype=torch.uint8, device="cuda")

    def drop() -> None:
        for i in range(300):
            torch.empty(_MIB * (1 + i % 50), dtype=torch.uint8, device="cuda")
            torch.cuda.memory_stats()
            if i % 20 == 0:
                allocator.give_back_all()
            if i == 150:
                allocator.drop_blocks(0)

    if history:
        torch.cuda.memory._record_memory_history()
    try:
        _at_the_same_time(replay, drop)
    finally:
        if history:
            torch.cuda.memory._record_memory_history(enabled=None)
    assert not _is_held()


def test_beside_a_capture_of_the_program() -> None:
    graphed, x = _holding()
    expected = _step(x)
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
    x = torch.ones(_PART // 4, device="cuda")
    for _ in range(_WARM_UP):
        model(x)
    assert_used()
    assert all(row.block_bytes >= _PART for row in captured())


@pytest.mark.parametrize("audit", [1, 3])
def test_audits(audit: int) -> None:
    graphed = pygraph.graph(_step, select="always", audit=audit)
    x = _input()
    expected = _step(x)
    for _ in range(12):
        assert_same(graphed(x), expected)
    assert_used()
    assert _is_held()
    (row,) = pygraph.stats()
    assert row.audits > 0 and row.audits_failed == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_graph_on_another_device_than_the_current_one() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return _step(x) + 1

    graphed = pygraph.graph(step, select="always", audit=False)
    x = _input("cuda:1")
    before = torch.cuda.memory_allocated(1)
    elsewhere = torch.cuda.memory_allocated(0)
    for _ in range(_WARM_UP):
        result = graphed(x)
    assert_used()
    assert _is_held()
    runtime.engine().drop_blocks(0)
    assert _is_held()
    assert torch.cuda.memory_allocated(1) - before >= _INTERNAL
    assert torch.cuda.memory_allocated(0) <= elsewhere
    assert_same(result, step(x))
