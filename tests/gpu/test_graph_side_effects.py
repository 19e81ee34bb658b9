"""Steps that do on the GPU what is no operator: record events, seed generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

import pygraph

from .support import randn

_WARM = 24  # calls after which a small callable is replayed


def _reasons() -> str:
    return "; ".join(row.reason for row in pygraph.stats() if row.reason)


def _assert_same_series(make: Callable[[Any], list[torch.Tensor]]) -> None:
    """make: makes calls of a step, given what wraps it."""
    expected, got = make(lambda function: function), make(pygraph.graph)
    wrong = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if not torch.equal(a, b)]
    assert not wrong, f"results {wrong} of {len(got)} differ"


def test_another_stream_waits_for_an_event_of_the_step() -> None:
    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    weight = randn(3072, 3072) / 55

    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = x @ weight
        done.record()
        return x

    graphed, wrong = pygraph.graph(step), []
    for i in range(_WARM):
        y = graphed(torch.full((3072, 3072), float(i + 1), device="cuda"))
        with torch.cuda.stream(side):
            side.wait_event(done)
            seen = y.clone()
        y.record_stream(side)
        torch.cuda.synchronize()
        if not torch.equal(seen, y):
            wrong.append(i)
    assert not wrong, f"in calls {wrong} the result was read before it was there"
    assert "it may record the event" in _reasons()


@pytest.mark.parametrize("way", ["event", "stream", "torch.Event"])
def test_events_that_the_step_records_tell_of_its_calls(way: str) -> None:
    kind: Any = torch.Event if way == "torch.Event" else torch.cuda.Event
    first, last = (kind(enable_timing=True) for _ in range(2))
    weight = randn(64, 64)

    def record(event: Any) -> None:
        if way == "stream":
            torch.cuda.current_stream().record_event(event)
        else:
            event.record()

    def step(x: torch.Tensor) -> torch.Tensor:
        record(first)
        x = x @ weight
        record(last)
        return x

    graphed, x, old = pygraph.graph(step), randn(64, 64), []
    for i in range(_WARM):
        before = kind(enable_timing=True)
        before.record()
        graphed(x)
        torch.cuda.synchronize()
        if before.elapsed_time(first) < 0 or before.elapsed_time(last) < 0:
            old.append(i)
    assert not old, f"in calls {old} the events are those of earlier calls"
    assert "it may record the event" in _reasons()


def test_streams_of_the_steps_own_are_ordered_by_events() -> None:
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    weight = randn(64, 64)

    def step(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x @ weight
        torch.cuda.current_stream().wait_stream(side)
        return y + x

    graphed = pygraph.graph(step)
    for _ in range(_WARM):
        x = randn(64, 64)
        assert torch.equal(graphed(x), step(x))
        torch.cuda.synchronize()
    assert "event" not in _reasons()


@pytest.mark.parametrize("draws", [True, False], ids=["and draws", "for what follows"])
@pytest.mark.parametrize("way", ["manual_seed", "manual_seed_all", "generator", "set_rng_state"])
def test_a_step_seeds_the_gpu(draws: bool, way: str) -> None:
    index = torch.cuda.current_device()
    state = torch.cuda.get_rng_state()
    seed: Callable[[], object] = {
        "manual_seed": lambda: torch.cuda.manual_seed(7),
        "manual_seed_all": lambda: torch.cuda.manual_seed_all(7),
        "generator": lambda: torch.cuda.default_generators[index].manual_seed(7),
        "set_rng_state": lambda: torch.cuda.set_rng_state(state),
    }[way]

    def step(x: torch.Tensor) -> torch.Tensor:
        seed()
        return F.dropout(x, 0.5, True) if draws else x * 2

    def make(wrap: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        call, x, series = wrap(step), torch.ones(512, device="cuda"), []
        for _ in range(_WARM):
            series.append(call(x).clone())
            series.append(torch.rand(16, device="cuda"))  # the program's, between calls
        return series

    _assert_same_series(make)
    assert "it sets the state of a random number generator of the GPU" in _reasons()


def test_checkpointing_in_the_step_is_no_seeding() -> None:
    """It reads the states of the generators, and puts them back."""
    w = torch.nn.Parameter(torch.ones(64, device="cuda"))

    def step(x: torch.Tensor) -> Any:
        w.grad = None
        part: Any = lambda x: (x * w).sin()  # noqa: E731
        loss: Any = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)
        loss.sum().backward()
        return loss.sum().detach()

    graphed = pygraph.graph(step)
    for _ in range(_WARM):
        x = randn(64)
        assert torch.equal(graphed(x), step(x))
    assert "generator" not in _reasons()
