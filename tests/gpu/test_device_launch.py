"""Graphs with many fills, whose executables a device could launch, too: results, streams, profiles."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import pygraph

from .support import captured, randn

_FILLS = 12
_SECOND = 2_000_000_000  # clock cycles of torch.cuda._sleep, about


def _program(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x
    for _ in range(_FILLS):
        # Several blocks add up one number: PyTorch clears what they wait for each other with, by a fill
        # (ATen/native/cuda/Reduce.cuh).
        total = total + total.sum() * scale
    return total, total.sum()


def _graphed(by: str) -> Any:
    if by == "backend":
        made = torch.compile(_program, backend="aot_eager")  # Inductor's reductions have no fills
        made = pygraph.graph(made, select="always")
    else:
        made = pygraph.graph(_program, select="always")
    x, scale = randn(1024, 1024), randn(1) * 1e-7
    with torch.no_grad():
        for _ in range(8):
            made(x, scale)
    (graph,) = captured()
    assert graph.replays > 0
    return made


@pytest.mark.parametrize("by", ["graph", "backend"])
def test_calls_in_a_row_have_their_own_inputs_and_results(by: str) -> None:
    made = _graphed(by)
    inputs = [(randn(1024, 1024), randn(1) * 1e-7) for _ in range(60)]
    torch.cuda.synchronize()
    with torch.no_grad():
        torch.cuda._sleep(_SECOND // 4)  # they wait in the queue together
        found = [made(*of) for of in inputs]
        for of, results in zip(inputs, found, strict=True):
            assert all(map(torch.equal, results, _program(*of)))


def test_two_streams_in_turns() -> None:
    made = _graphed("graph")
    streams = [torch.cuda.Stream() for _ in range(2)]
    x, scale = randn(1024, 1024), randn(1) * 1e-7
    with torch.no_grad():
        expected = x
        for _ in range(40):
            expected = _program(expected, scale)[0]
        torch.cuda.synchronize()
        current = x
        for i in range(40):
            mine, other = streams[i % 2], streams[(i + 1) % 2]
            mine.wait_stream(other)
            with torch.cuda.stream(mine):
                current.record_stream(mine)
                current = made(current, scale)[0]
        torch.cuda.synchronize()
    assert torch.equal(current, expected)


def _names(call: Any) -> collections.Counter[str]:
    """What the GPU does in three calls."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    on_gpu = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return collections.Counter(e.name for e in on_gpu if "Memset" in e.name or "void" in e.name)


def test_a_profile_shows_all_kernels_and_fills() -> None:
    made = _graphed("graph")
    x, scale = randn(1024, 1024), randn(1) * 1e-7
    with torch.no_grad():
        before = captured()[0].replays
        graphed = _names(lambda: made(x, scale))
        assert captured()[0].replays == before + 3
        uncaptured = _names(lambda: _program(x, scale))
    assert graphed == uncaptured
    assert sum(count for name, count in graphed.items() if "Memset" in name) >= 3 * _FILLS
