"""Workspaces where PyTorch's allocator is configured otherwise, and odd sizes."""

from __future__ import annotations

import functools

import pytest
import torch

from pygraph import runtime
from pygraph.gpu import allocator

from .held_blocks import (
    LIMIT,
    MIB,
    PART,
    WARM_UP,
    holding,
    is_held,
    make_input,
    step,
    warmed_up,
)
from .held_blocks_programs import run_program
from .support import assert_same

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


pytestmark = pytest.mark.usefixtures("holds_memory")


def odd_step(x: torch.Tensor) -> torch.Tensor:
    """Blocks whose sizes are no multiple of anything, and a workspace of odd size besides."""
    small = [torch.sin(x[: 1000003 + i]) for i in range(3)]
    parts = [torch.sin(x[: 9 * MIB + 1 + 3 * i] * (i + 1)) for i in range(4)]
    bytes_ = [(x[: 10 * MIB - 7].abs() * i).to(torch.uint8) for i in range(1, 3)]
    sums = [part.amax() for part in reversed(parts)] + [part.amin() for part in reversed(small)]
    return torch.stack([*sums, *(b.sum().float() for b in bytes_)])


def test_odd_sizes() -> None:
    graphed, x = warmed_up(odd_step)
    for _ in range(3):
        assert_same(graphed(x), odd_step(x))
    y = make_input()[3:]  # misaligned, and another size
    for _ in range(WARM_UP):
        assert_same(graphed(y), odd_step(y))
    runtime.release_workspaces()
    assert_same(graphed(x), odd_step(x))
    allocator.drop_blocks(0)
    for z in (x, y):
        assert_same(graphed(z), odd_step(z))


def test_a_program_that_empties_the_cache_at_every_call() -> None:
    graphed, x = holding()
    expected = step(x)
    allocated = torch.cuda.memory_allocated()
    for i in range(40):
        torch.cuda.empty_cache()
        result = graphed(x)
        assert torch.cuda.memory_allocated() - allocated < MIB
        if i % 10 == 0:
            assert_same(result, expected)
    assert is_held()
    assert torch.cuda.memory_reserved() < LIMIT // 8


def test_a_cache_that_the_program_switches_off() -> None:
    if not hasattr(torch.cuda.memory, "caching_allocator_enable"):
        pytest.skip("this PyTorch cannot")
    before = torch.cuda.memory_allocated()
    graphed, x = holding()
    expected = step(x)
    torch.cuda.memory.caching_allocator_enable(False)
    try:
        for i in range(3):
            assert_same(graphed(x), expected)
            if i == 1:
                runtime.release_workspaces()
        allocator.drop_blocks(0)
        assert_same(graphed(x), expected)
    finally:
        torch.cuda.memory.caching_allocator_enable(True)
    for _ in range(3):
        assert_same(graphed(x), expected)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 2 * PART


_CONFIGURED = """
x = make_input()
expected = {function}(x)
torch.cuda.synchronize()
torch.cuda.empty_cache()
{function}(x)
torch.cuda.synchronize()
needed = torch.cuda.memory_reserved()  # uncaptured
torch.cuda.empty_cache()
peaks = []
move = allocator.defragment_workspace
def measured(graph):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    move(graph)
    peaks.append(torch.cuda.max_memory_reserved() - before)
allocator.defragment_workspace = measured
graphed = pygraph.graph({function}, select="always", audit=False)
for _ in range(WARM_UP):
    result = graphed(x)
allocator.defragment_workspace = move
assert_same(result, expected)
rows = [(r.state, r.reason, r.block_bytes, r.workspace_bytes) for r in pygraph.stats()]
say("rows", rows)
say("used", int(is_in_use()))
say("held", int(is_in_use() and all(r.block_bytes == 0 for r in captured())))
say("needed", needed // MIB)
say("peak", max(peaks, default=0) // MIB)
say("left", torch.cuda.memory_reserved() // MIB)
for i in range(40):
    result = graphed(x)
    if i % 8 == 0:
        runtime.release_workspaces()
    if i % 5 == 0:
        torch.cuda.empty_cache()
assert_same(result, expected)
allocator.drop_blocks(0)
assert_same(graphed(x), expected)
del result, expected
torch.cuda.synchronize()
say("allocated", (torch.cuda.memory_allocated() - x.nbytes) // MIB)
say("done")
"""


_CONFIGURATIONS = [
    "roundup_power2_divisions:2",
    "expandable_segments:True",
    "garbage_collection_threshold:0.5,max_split_size_mb:64",
]


@functools.cache
def _configured(settings: str, function: str) -> dict[str, int]:
    environment = {"PYTORCH_ALLOC_CONF": settings} if settings else {}
    lines = run_program(_CONFIGURED.format(function=function), **environment)
    pairs = [line.split() for line in lines if len(line.split()) == 2]
    return {name: int(value) for name, value in pairs}


@pytest.mark.parametrize("settings", _CONFIGURATIONS)
def test_a_search_for_a_place_takes_no_gigabytes(settings: str) -> None:
    """Where the allocator rounds requests up, a new segment, too, is larger than the workspace by more
    than 20 MiB, and none is found."""
    found = _configured(settings, "step_of_seven")
    if not found["used"]:
        pytest.skip("there is no graph")
    assert found["peak"] < 2 * 384 + 64, found
    assert found["left"] < found["needed"] + 2 * 384 + 64, found
    assert found["allocated"] < 64, found


@pytest.mark.parametrize("settings", _CONFIGURATIONS)
def test_a_workspace_without_blocks_leaves_no_gigabytes_in_the_cache(settings: str) -> None:
    found = _configured(settings, "step_of_small_parts")
    if not found["used"]:
        pytest.skip("there is no graph")
    assert found["left"] < found["needed"] + 2 * 192 + 64, found
    assert found["peak"] < 2 * 192 + 64, found


def test_blocks_are_held_where_requests_are_rounded_up() -> None:
    """Such a segment is the workspace's own."""
    if not _configured("", "step_of_seven")["held"]:
        pytest.skip("nor are they without")
    assert _configured("roundup_power2_divisions:2", "step_of_seven")["held"]
