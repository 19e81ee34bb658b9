"""What surrounds a call: user graphs, profilers, modes, caches, resets, dispatch modes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pygraph

from .support import assert_same, captured, check_inference, compiled, randn


def _warm(model: object, x: torch.Tensor, calls: int = 4) -> torch.Tensor:
    with torch.no_grad():
        for _ in range(calls):
            result = model(x)
    return result


def test_a_users_own_graph_around_the_call() -> None:
    model = compiled(lambda x: torch.relu(x @ x))
    x = randn(64, 64)
    _warm(model, x)
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        model(x)
    torch.cuda.synchronize()
    replays = captured()[0].replays
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        result = model(x)
    assert captured()[0].replays == replays
    x.copy_(randn(64, 64))
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(result, torch.relu(x @ x))


@pytest.mark.parametrize("mib", [4, 16])
def test_a_workspace_does_not_hold_a_large_free_piece(mib: int) -> None:
    """What large tensors have left is the next ones', or can be given back."""
    model = compiled(lambda x: x[:400] + x.cumsum(0).cumsum(1).sum())
    x = randn(1 << 10, mib << 8)
    for _ in range(4):
        torch.cuda.empty_cache()
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        _warm(model, x, calls=1)
    assert len(captured()) == 1 and captured()[0].workspace_bytes >= x.nbytes
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < 1 << 29, _large_segments()


def test_a_workspace_leaves_a_large_segment_that_others_use() -> None:
    """Such a segment cannot be given back before the workspace moves."""
    model = compiled(lambda x: x[:400] + x.cumsum(0).cumsum(1).sum())
    x = randn(1 << 10, 16 << 8)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    large = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    del large
    others = torch.empty(1 << 25, dtype=torch.uint8, device="cuda")  # the first piece of it
    _warm(model, x, calls=6)
    assert len(captured()) == 1 and captured()[0].workspace_bytes >= x.nbytes
    torch.cuda.synchronize()
    del others
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < 1 << 29, _large_segments()


def _large_segments() -> list[tuple[int, list[tuple[int, str]]]]:
    """Of PyTorch's allocator, with their pieces, for a message; the device's free memory first."""
    segments: list[Any] = torch.cuda.memory_snapshot()
    found = [(s["total_size"], [(b["size"], b["state"]) for b in s["blocks"]]) for s in segments]
    free, _ = torch.cuda.mem_get_info()
    return [(free, []), *(row for row in found if row[0] >= 1 << 29)]


def test_a_users_own_graph_keeps_the_workspace_it_was_warmed_up_with() -> None:
    """On the stream of its capture, cuBLAS had a workspace before; the graph holds its address."""
    a, b = randn(64, 1 << 16), randn(1 << 16, 64)  # sums so long are split, by way of the workspace
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = a @ b
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = a @ b
    model = compiled(lambda x: torch.relu(x @ x))
    _warm(model, randn(512, 512))
    assert len(captured()) == 1
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    others = torch.full((min(free // 2, 1 << 34) // 4,), float("nan"), device="cuda")
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(result, expected)
    assert others.isnan().all()  # nobody else's memory was written


def test_the_profiler_sees_kernels_and_recording_waits_for_it() -> None:
    model = compiled(lambda x: torch.relu(x @ x) + 1)
    x = randn(64, 64)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, profile_memory=True):
        _warm(model, x)
    assert captured() == []
    _warm(model, x)
    assert len(captured()) == 1
    with torch.profiler.profile(activities=activities) as profile:
        result = _warm(model, x)
        torch.cuda.synchronize()
    torch.testing.assert_close(result, torch.relu(x @ x) + 1)
    assert any(event.device_type == torch.profiler.DeviceType.CUDA for event in profile.events())
    assert any(event.name == "pygraph inference" for event in profile.events())


def test_max_autotune() -> None:
    model = compiled(lambda x: torch.relu(x @ x), mode="max-autotune")
    x = randn(128, 128)
    torch.testing.assert_close(_warm(model, x), torch.relu(x @ x), atol=1e-2, rtol=1e-2)
    assert len(captured()) == 1


def test_a_mode_without_graphs_is_honoured() -> None:
    model = compiled(lambda x: torch.relu(x @ x), mode="max-autotune-no-cudagraphs")
    _warm(model, randn(64, 64))
    assert pygraph.stats() == []


def test_a_warm_code_cache_still_gets_graphs() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ x) * 0.123

    for _ in range(2):
        torch._dynamo.reset()
        _warm(compiled(function), randn(64, 64))
        assert any(row.replays for row in captured())


def test_dynamo_reset_in_the_middle() -> None:
    model = compiled(lambda x: torch.cos(x) * 3)
    x = randn(64)
    _warm(model, x)
    torch._dynamo.reset()
    assert_same(_warm(model, x), _warm(model, x))


def test_reset_gives_up_graphs_and_the_program_goes_on() -> None:
    model = compiled(lambda x: torch.cos(x) * 5)
    x = randn(64)
    first = _warm(model, x)
    pygraph.reset()
    assert captured() == []
    assert_same(_warm(model, x), first)
    assert len(captured()) == 1


def test_inference_mode() -> None:
    model = compiled(lambda x: torch.relu(x @ x))
    x = randn(64, 64)
    with torch.inference_mode():
        for _ in range(4):
            result = model(x)
    assert result.is_inference()
    torch.testing.assert_close(result, torch.relu(x @ x))


def test_a_branch_of_torch_cond() -> None:
    def branch(flag: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x @ x)
        return torch.cond(flag, lambda y: y + 1, lambda y: y - 1, (y,)) * 2

    model = compiled(branch)
    x = randn(32, 32)
    with torch.no_grad():
        for call in range(6):
            flag = torch.tensor(call % 2 == 0, device="cuda")
            y = torch.relu(x @ x)
            torch.testing.assert_close(model(flag, x), (y + 1 if call % 2 == 0 else y - 1) * 2)
    assert len(captured()) >= 1


def test_a_cut_in_the_middle_makes_two_graphs() -> None:
    def cut(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x @ x)
        count = (y > 1e9).nonzero().shape[0]
        return torch.sin(y) + count

    check_inference(cut, lambda: (randn(32, 32),), graphs=2)


def test_dispatch_modes_see_the_operators() -> None:
    seen: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    model = compiled(lambda x: torch.mm(x, x) + 1)
    x = randn(8, 8)
    expected = _warm(model, x)
    replays = captured()[0].replays
    with torch.no_grad(), Log():
        result = model(x)
    assert_same(result, expected)
    assert captured()[0].replays == replays
    assert any("mm" in name for name in seen)


def test_a_graph_of_cpu_operations_only() -> None:
    model = compiled(lambda x: x * 2 + 1)
    x = torch.randn(16)
    assert_same(model(x), x * 2 + 1)
    assert pygraph.stats() == []


def test_step_marks_stay_harmless() -> None:
    model = compiled(lambda x: x * 2)
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            x = randn(8)
            assert_same(model(x), x * 2)


_WHOLE_PROGRAM = """
import gc, torch, pygraph
model = torch.compile(lambda x: torch.relu(x @ x) + 1, backend="pygraph")
other = torch.compile(lambda x: torch.fft.fft(x).abs(), backend="pygraph")
x = torch.randn(64, 64, device="cuda")
with torch.no_grad():
    for _ in range(4):
        model(x), other(x)
if {resets}:
    pygraph.reset()
print(sum(row.replays for row in pygraph.stats()) > 0 or {resets}, flush=True)
"""


@pytest.mark.parametrize("resets", [False, True])
def test_a_process_ends_well(resets: bool) -> None:
    """Pools, graphs and modules are gone in whatever order Python drops them."""
    environment = {**os.environ, "PYGRAPH_SELECT": "always"}
    source = _WHOLE_PROGRAM.format(resets=resets)
    process = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=300
    )
    assert process.stdout.split() == ["True"] and process.returncode == 0, process.stderr
