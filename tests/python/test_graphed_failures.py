"""Errors, threads and resets of graphed callables."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pygraph
from pygraph import runtime

from .graphed_programs import Training, adamw, assert_same, batches, reason, replays


@pytest.mark.parametrize("calls", [0, 1, 2, 3, 6])
def test_an_exception_is_the_programs_and_changes_nothing(partitions: Any, calls: int) -> None:
    uncaptured, at = Training(adamw), Training(adamw)
    step = pygraph.graph(at.step)
    for x, y in batches(calls):
        uncaptured.step(x, y), step(x, y)
    for run in (uncaptured.step, step):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            run(torch.randn(6, 3), torch.zeros(6, dtype=torch.long))
    for x, y in batches(8):
        uncaptured.step(x, y), step(x, y)
    assert_same(at.state(), uncaptured.state())
    assert replays(partitions) >= 1


@pytest.mark.parametrize("calls", range(3))
def test_the_program_may_raise_stop_iteration(partitions: Any, tmp_path: Path, calls: int) -> None:
    """Because of what cannot be seen."""
    w = torch.ones(3)
    end = tmp_path / "end"

    def step(x: torch.Tensor) -> torch.Tensor:
        if os.path.exists(end):
            raise StopIteration("over")
        return x * w

    run = pygraph.graph(step)
    for i in range(calls):
        run(torch.full((3,), float(i)))
    end.touch()
    with pytest.raises(StopIteration, match="over"):
        run(torch.ones(3))


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_rehearsal_that_fails_midway_is_undone(partitions: Any, error: BaseException) -> None:
    at = Training(adamw)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(at.model(x), y).backward()
        if at.optimizer.param_groups[0]["capturable"]:
            raise error
        at.optimizer.step()
        at.optimizer.zero_grad()

    run = pygraph.graph(step)
    for x, y in batches(3):
        run(x, y)
    before = at.state()
    function = partitions.all[0].function
    x, y = batches(1)[0]
    inputs = [t.clone() for t in [x, y, *function.state_tensors, torch.tensor(0.1)]]
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        function.rehearse(inputs)
    assert_same(at.state(), before)
    assert type(at.optimizer.param_groups[0]["lr"]) is float
    assert all(p.grad is None for p in at.model.parameters())
    assert torch._C._is_multithreading_enabled()  # type: ignore[attr-defined]


def test_results_that_replays_cannot_make_are_refused(partitions: Any) -> None:
    function = pygraph.graph(lambda x: SimpleNamespace(value=x + 1))
    for _ in range(4):
        assert function(torch.ones(2)).value.tolist() == [2.0, 2.0]
    assert "returns a SimpleNamespace" in reason() and partitions.all == []


def test_a_graphed_callable_inside_of_another_is_called_as_it_is(partitions: Any) -> None:
    inner = pygraph.graph(lambda x: x + 1)
    outer = pygraph.graph(lambda x: inner(x) * 2)
    for i in range(8):
        assert outer(torch.full((1,), float(i))).tolist() == [2.0 * i + 2]
    assert len(partitions.all) == 1


def test_something_that_is_always_different_ends_the_observations(
    partitions: Any, caplog: pytest.LogCaptureFixture
) -> None:
    holder = SimpleNamespace(number=0.0)
    calls = 0

    def body(x: torch.Tensor) -> torch.Tensor:
        return x + holder.number

    function = pygraph.graph(body)
    with caplog.at_level(logging.WARNING):
        for calls in range(30):
            holder.number = float(calls)
            assert function(torch.zeros(1)).item() == calls
    assert "holder.number differs from call to call" in caplog.text
    assert len(partitions.all) <= 10


def test_a_reset_begins_anew(partitions: Any) -> None:
    function = pygraph.graph(lambda x: x + 1)
    for _ in range(5):
        function(torch.ones(2))
    function.reset()
    for _ in range(5):
        function(torch.ones(2))
    assert len(partitions.all) == 2


def test_threads_may_call(partitions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # The replays of this world are rehearsals; the engine's need no memory for themselves.
    monkeypatch.setattr(runtime, "begin_capturing", lambda undo: None)
    model = torch.nn.Linear(4, 2)

    @pygraph.graph
    @torch.no_grad()
    def function(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    wrong: list[object] = []

    def run(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(30):
            x = torch.randn(3, 4, generator=generator)
            with torch.no_grad():
                if not torch.equal(function(x), model(x)):
                    wrong.append(x)

    with torch.no_grad():  # as in the threads
        for _ in range(4):
            function(torch.ones(3, 4))
    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and replays(partitions) >= 4 * 30


def test_without_a_gpu_the_function_is_called_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "unavailable_reason", lambda: "there is no CUDA GPU")
    function = pygraph.graph(lambda x: x + 1)
    assert function(torch.ones(1)).item() == 2.0
    assert [entry.reason for entry in function.entries.values()] == ["there is no CUDA GPU"]
