"""Graphs whose addresses the device patches: right results, whatever moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from pygraph import device_patching, runtime, selection, selector
from pygraph.selection import PATCHED_ON_DEVICE, REPLAYED
from tests.gpu.support import assert_same, captured, compiled, randn

_STEPS = 30
_CALLS = 60  # until every trial is over, with the settings below


@pytest.fixture(autouse=True)
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Graphs are looked at after a few calls, and patched on the device if they touch many nodes."""
    monkeypatch.setenv("PYGRAPH_SELECT", "auto")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(selector, "_CALLS_UNTIL_COUNT", 6)
    monkeypatch.setattr(selector, "_CALLS_PER_LOOK", 10)
    monkeypatch.setattr(selector, "_BAND", 1e9)
    _prefer(monkeypatch, PATCHED_ON_DEVICE, REPLAYED)


def _prefer(monkeypatch: pytest.MonkeyPatch, *variants: str) -> None:
    """The first of these that is on trial is selected, however long it takes."""
    monkeypatch.setattr(selection, "_CLEAR", 0.0)
    monkeypatch.setattr(
        selection, "choose", lambda timings: next(name for name in variants if name in timings)
    )


def _steps(x: torch.Tensor) -> torch.Tensor:
    """Each step reads from the input, and cannot be fused with the next."""
    y = x[0]
    for i in range(_STEPS):
        y = torch.softmax(y * 3 + x[i % len(x)], -1)
    return y


def _moving(*size: int) -> Iterator[torch.Tensor]:
    """Another tensor each time, at another address than the last seven."""
    kept: list[torch.Tensor] = []
    while True:
        kept = [*kept[-7:], randn(*size)]
        yield kept[-1]


def _uncaptured(function: Callable[..., Any]) -> Callable[..., Any]:
    return compiled(function, options={"pygraph.select": "never"})


def _run(function: Callable[..., Any], inputs: Iterator[torch.Tensor], calls: int = _CALLS) -> None:
    """Each call's result is that of the same code uncaptured, and later calls leave it alone."""
    program, expected = compiled(function), _uncaptured(function)
    results = []
    for _ in range(calls):
        x = next(inputs)
        results.append((x, program(x)))
        results = results[-4:]
        assert_same(results[0][1], expected(results[0][0]))


def test_an_input_that_moves_is_patched_on_the_device() -> None:
    _run(_steps, _moving(4, 512))
    (row,) = captured()
    assert row.patched_on_device
    assert row.nodes_touched > 20 * row.replays
    assert set(row.timings) == {"uncaptured", REPLAYED, PATCHED_ON_DEVICE}


def test_an_input_that_stays_is_not() -> None:
    x = randn(4, 512)

    def same() -> Iterator[torch.Tensor]:
        while True:
            yield x

    _run(_steps, same())
    (row,) = captured()
    assert not row.patched_on_device
    assert PATCHED_ON_DEVICE not in row.timings


def test_a_form_that_loses_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    _prefer(monkeypatch, REPLAYED)
    _run(_steps, _moving(4, 512))
    (row,) = captured()
    assert not row.patched_on_device
    assert PATCHED_ON_DEVICE in row.timings


def test_a_form_that_is_not_proven_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_patching, "_agree", lambda *found: False)
    _run(_steps, _moving(4, 512))
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
    _run(_steps, _moving(4, 512))
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

    program, expected = compiled(function), _uncaptured(function)
    weight = randn(512, 512)
    total = randn(16, 512)
    inputs = _moving(4, 16, 512)
    for _ in range(_CALLS):
        x = next(inputs)
        total = total.clone()
        before = total.clone()
        result = program(x, total, weight)
        assert_same(result, expected(x, before, weight))
        assert_same(total, before)
    assert any(row.patched_on_device for row in captured())


def test_random_numbers_are_drawn_as_before() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = _steps(x)
        for _ in range(4):
            y = torch.softmax(torch.dropout(y + x[0], 0.5, True), -1)
        return y

    def results(select: str) -> list[torch.Tensor]:
        torch._dynamo.reset()
        runtime.partitions.clear()
        program = torch.compile(function, backend="pygraph", options={"pygraph.select": select})
        torch.manual_seed(1)
        inputs = [randn(4, 512) for _ in range(8)]
        torch.manual_seed(2)
        return [program(inputs[i % 8]) for i in range(_CALLS)]

    assert_same(results("auto"), results("never"))


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

    def train(select: str) -> list[torch.Tensor]:
        torch._dynamo.reset()
        runtime.partitions.clear()
        torch.manual_seed(3)
        module = Deep().cuda()
        model = torch.compile(module, backend="pygraph", options={"pygraph.select": select})
        seen: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []
        for _ in range(_CALLS):
            x = randn(8192, 256)
            kept = [*kept[-5:], x]
            module.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            seen = [*seen[-60:], loss.detach(), *(p.grad for p in module.parameters())]
        return seen

    assert_same(train("auto"), train("never"))
    # The forward's input moves, and so do the gradients, which the loop keeps.


def test_streams_by_turns() -> None:
    program, expected = compiled(_steps), _uncaptured(_steps)
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = _moving(4, 512)
    results = []
    for i in range(2 * _CALLS):
        x = next(inputs)
        torch.cuda.synchronize()  # the input is there
        with torch.cuda.stream(streams[i % 2]):
            # Both streams' launches are under way together.
            results = [*results[-6:], (x, program(x)), (x, program(x))]
    torch.cuda.synchronize()
    assert captured()[0].patched_on_device
    for x, result in results:
        assert_same(result, expected(x))


def test_what_was_selected_is_remembered_on_disk() -> None:
    _run(_steps, _moving(4, 512))
    (first,) = captured()
    assert first.patched_on_device
    torch._dynamo.reset()
    runtime.partitions.clear()
    _run(_steps, _moving(4, 512), calls=12)  # too few for a trial
    (second,) = captured()
    assert second.patched_on_device
    assert second.timings == first.timings


def test_memory_is_given_back() -> None:
    def resident() -> int:
        torch._dynamo.reset()
        pygraph.reset()
        runtime.partitions.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    _run(_steps, _moving(4, 512))
    before = resident()
    for _ in range(3):
        _run(_steps, _moving(4, 512))
        assert captured()[0].patched_on_device
    assert before - resident() <= 4 << 20  # the driver takes memory for executables 2 MiB at a time
