"""Each driver function that PyGraph calls fails once, while a fresh program is recorded, verified, put
on trial, replayed and dropped. Results are right, nothing raises, the next program works."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import pygraph
from pygraph import runtime
from pygraph.partition import selector
from pygraph.select import trial
from pygraph.select.trial import REPLAYED

from . import faults
from .support import assert_same, captured, compiled, randn

if not torch.cuda.is_available() or not faults.install():
    pytest.skip(
        "needs a GPU and a C++ compiler, before PyGraph uses the driver", allow_module_level=True
    )

_CALLS = 24  # until trials are over, with the settings below


@pytest.fixture(autouse=True)
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every program is tried, and its graph selected, within a few calls."""
    monkeypatch.setenv("PYGRAPH_SELECT", "auto")
    monkeypatch.setattr(selector, "_CALLS_PER_RECHECK", 6)
    monkeypatch.setattr(selector, "_BAND", 1e9)
    monkeypatch.setattr(trial, "_CLEAR", 0.0)
    monkeypatch.setattr(trial, "choose", lambda timings: REPLAYED)
    faults.clear()
    yield
    faults.clear()


@contextmanager
def _paused() -> Iterator[None]:
    runtime.engine().pause(True)
    try:
        yield
    finally:
        runtime.engine().pause(False)


def _program(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Many kernels that use an input, products, a fill and two branches."""
    y = x
    for i in range(24):
        y = torch.softmax(y * 3 + x, i % 2)
    left, right = y @ weight, torch.relu(x) @ weight
    return left + right, torch.zeros_like(x).index_add_(0, torch.arange(64, device=x.device), y)


def _live(calls: int = _CALLS) -> None:
    """A fresh program. Each result is that of an uncaptured run, and later calls leave it alone."""
    torch._dynamo.reset()
    pygraph.reset()
    program = compiled(_program)
    weight = randn(64, 64)
    kept: list[tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]] = []
    with torch.no_grad():
        for _ in range(calls):
            x = randn(64, 64)
            kept = [*kept[-5:], (x, program(x, weight))]
            with _paused():
                assert_same(kept[0][1], program(kept[0][0], weight))
    for row in pygraph.stats():
        assert row.state != "refused" or row.reason, row


def _drop() -> int:
    """Bytes that PyTorch has allocated when the programs are gone."""
    torch._dynamo.reset()
    pygraph.reset()
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@functools.cache
def _calls_of_a_life() -> dict[str, int]:
    """What a life calls, apart from what the first one of a process does."""
    _live()
    _drop()
    before = {name: faults.calls(name) for name in faults.names()}
    _live()
    assert captured(), pygraph.stats()
    _drop()
    return {name: faults.calls(name) - before[name] for name in faults.names()}


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("name", faults.names())
def test_a_call_of_the_driver_fails(name: str, place: str) -> None:
    calls = _calls_of_a_life()[name]
    if calls < {"first": 1, "middle": 3, "last": 2}[place]:
        pytest.skip(f"{calls} such calls in a program's life")
    call = {"first": 1, "middle": (calls + 1) // 2, "last": calls}[place]
    error = {
        "first": faults.OUT_OF_MEMORY,
        "middle": faults.INVALID_VALUE,
        "last": faults.NOT_SUPPORTED,
    }
    allocated = _drop()
    failed = faults.failures(name)
    faults.inject(name, error[place], call)
    _live()
    after = _drop()
    # Timing decides how often some functions are called: the last call may not come.
    assert place == "last" or faults.failures(name) == failed + 1
    faults.clear()
    assert name in faults.GIVE_BACK or after <= allocated
    _live()
    assert captured(), pygraph.stats()


def test_a_graph_that_fails_for_good_releases_its_memory() -> None:
    """Also the blocks that it holds."""

    def step(x: torch.Tensor) -> torch.Tensor:
        parts = [torch.sin(x * i) for i in range(1, 6)]
        return torch.stack([part.amax() for part in reversed(parts)]).sum()

    x = randn(10 << 20)
    before = torch.cuda.memory_allocated()
    graphed = pygraph.graph(step, select="always", audit=False)
    for _ in range(8):
        graphed(x)
    (row,) = captured()
    assert row.block_bytes == 0
    assert torch.cuda.memory_allocated() - before > 4 * x.nbytes
    faults.inject("cuGraphExecKernelNodeSetParams", faults.INVALID_VALUE)
    y = x.clone()
    for _ in range(2):
        assert_same(graphed(y), step(y))
    del y
    assert torch.cuda.memory_allocated() - before < x.nbytes
    (row,) = pygraph.stats()
    assert row.state == "refused"
    assert "graph_exec_kernel_set_params" in row.reason, row
    assert row.block_bytes > 0  # others may hold in its place


def test_every_kind_of_call_was_looked_at() -> None:
    called = [name for name, calls in _calls_of_a_life().items() if calls > 0]
    assert len(called) >= 24, called
