"""Graphs whose addresses the device patches: right results, whatever moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pygraph import runtime
from pygraph.partition import device_patching, selector
from pygraph.select import trial
from pygraph.select.trial import PATCHED_ON_DEVICE, REPLAYED
from tests.gpu.support import assert_same, captured, compiled, randn

_STEPS = 60  # half as many kernels
_CALLS = 60  # until every trial is over, with the settings below


@pytest.fixture(autouse=True)
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Graphs are looked at after a few calls, and patched on the device if they touch many nodes."""
    monkeypatch.setenv("PYGRAPH_SELECT", "auto")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(selector, "_CALLS_UNTIL_COUNT", 6)
    monkeypatch.setattr(selector, "_CALLS_PER_RECHECK", 10)
    monkeypatch.setattr(selector, "_BAND", 1e9)
    monkeypatch.setattr(device_patching, "_HOST_SECONDS", 1.0)  # whatever a call takes
    _prefer(monkeypatch, PATCHED_ON_DEVICE, REPLAYED)


def _prefer(monkeypatch: pytest.MonkeyPatch, *variants: str) -> None:
    """The first of these that is on trial is selected, however long it takes."""
    monkeypatch.setattr(trial, "_CLEAR", 0.0)
    monkeypatch.setattr(
        trial, "choose", lambda timings: next(name for name in variants if name in timings)
    )


def _steps(x: torch.Tensor) -> torch.Tensor:
    """Each step reads from the input, and cannot be fused with the next, which goes the other way."""
    y = x[0]
    for i in range(_STEPS):
        y = torch.softmax(y * 3 + x[i % len(x)], i % 2)
    return y


def _moving(*size: int) -> Iterator[torch.Tensor]:
    """Another tensor each time, at another address than the last seven."""
    kept: list[torch.Tensor] = []
    while True:
        kept = [*kept[-7:], randn(*size)]
        yield kept[-1]


@contextmanager
def _paused() -> Iterator[None]:
    """The same compiled code runs uncaptured. (Compiled anew, it might be tuned in another way.)"""
    runtime.engine().pause(True)
    try:
        yield
    finally:
        runtime.engine().pause(False)


def _run(function: Callable[..., Any], inputs: Iterator[torch.Tensor], calls: int = _CALLS) -> None:
    """Each call's result is that of an uncaptured run, and later calls leave it alone."""
    program = compiled(function)
    results = []
    for _ in range(calls):
        x = next(inputs)
        results.append((x, program(x)))
        results = results[-4:]
        with _paused():
            assert_same(results[0][1], program(results[0][0]))


def test_an_input_that_moves_is_patched_on_the_device() -> None:
    _run(_steps, _moving(4, 64, 64))
    (row,) = captured()
    assert row.patched_on_device
    assert row.nodes_touched > 20 * row.replays
    assert set(row.timings) == {"uncaptured", REPLAYED, PATCHED_ON_DEVICE}


def test_a_steady_loop_is_left_to_the_host() -> None:
    """The allocator gives each result the memory of the last one."""
    x = randn(4, 64, 64)
    program = compiled(_steps)
    for _ in range(_CALLS):
        result = program(x)
        del result
    (row,) = captured()
    assert not row.patched_on_device
    assert PATCHED_ON_DEVICE not in row.timings


def test_a_form_that_loses_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    _prefer(monkeypatch, REPLAYED)
    _run(_steps, _moving(4, 64, 64))
    (row,) = captured()
    assert not row.patched_on_device
    assert PATCHED_ON_DEVICE in row.timings


def test_a_form_that_is_not_proven_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_patching, "_agree", lambda *found: False)
    _run(_steps, _moving(4, 64, 64))
    (row,) = captured()
    assert not row.patched_on_device
    assert PATCHED_ON_DEVICE not in row.timings


def test_wrong_addresses_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof is one: a form that keeps an old input is refused by it."""
    original = device_patching.clone_shared_storages
    first: list[torch.Tensor] = []

    def stale(args: Any, positions: Any) -> list[Any]:
        clones = original(args, positions)
        first.append(clones[-1])
        return [*clones[:-1], torch.randn_like(clones[-1])] if len(first) > 2 else clones

    monkeypatch.setattr(device_patching, "clone_shared_storages", stale)
    _run(_steps, _moving(4, 64, 64))
    (row,) = captured()
    assert not row.patched_on_device and len(first) == 4


def test_written_inputs_products_copies_and_fills() -> None:
    """cuBLAS's kernels have their parameters in one piece; copies are patched by the host."""

    def function(x: torch.Tensor, total: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = _steps(x)
        for _ in range(4):
            y = torch.relu(y @ weight) + x[0]
        total += y
        return torch.cat([y, torch.zeros_like(y), x[1]])

    program = compiled(function)
    weight = randn(512, 512)
    total = randn(16, 512)
    inputs = _moving(4, 16, 512)
    for _ in range(_CALLS):
        x = next(inputs)
        total = total.clone()
        before = total.clone()
        result = program(x, total, weight)
        with _paused():
            assert_same(result, program(x, before, weight))
        assert_same(total, before)
    assert any(row.patched_on_device for row in captured())


def test_random_numbers_are_drawn_as_before() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = _steps(x)
        for _ in range(4):
            y = torch.softmax(torch.dropout(y + x[0], 0.5, True), -1)
        return y

    program = compiled(function)
    inputs = _moving(4, 64, 64)
    for seed in range(_CALLS):
        x = next(inputs)
        torch.manual_seed(seed)
        result = program(x), torch.rand(4, device="cuda")
        torch.manual_seed(seed)
        with _paused():
            assert_same(result, (program(x), torch.rand(4, device="cuda")))
    assert any(row.patched_on_device for row in captured())


def test_training_with_donated_memory() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(24))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x
            for layer in self.layers:
                y = torch.softmax(layer(y) + x, -1)
            return y

    module = Deep().cuda()
    model = compiled(module)

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        module.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return [loss.detach(), *(p.grad for p in module.parameters())]

    inputs = _moving(2048, 256)
    for _ in range(_CALLS):
        x = next(inputs)
        result = step(x)
        with _paused():
            assert_same(result, step(x))
    assert any(row.patched_on_device for row in captured())


def test_streams_by_turns() -> None:
    program = compiled(_steps)
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [randn(4, 64, 64) for _ in range(7)]
    torch.cuda.synchronize()
    results = []
    for i in range(2 * _CALLS):
        x = inputs[i % len(inputs)]
        with torch.cuda.stream(streams[i % 2]):  # nothing waits for the other one's launches
            results = [*results[-6:], (x, program(x))]
    torch.cuda.synchronize()
    assert captured()[0].patched_on_device
    for x, result in results:
        with _paused():
            assert_same(result, program(x))


def test_what_was_selected_is_remembered_on_disk() -> None:
    _run(_steps, _moving(4, 64, 64))
    (first,) = captured()
    assert first.patched_on_device
    torch._dynamo.reset()
    runtime.partitions.clear()
    _run(_steps, _moving(4, 64, 64), calls=12)  # too few for a trial
    (second,) = captured()
    assert second.patched_on_device
    assert second.timings == first.timings
