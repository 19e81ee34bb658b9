"""Trials: who is selected, after how many calls. Times are made up; no GPU needed."""

from __future__ import annotations

import random

import pytest
import torch

from pygraph.gpu.load import keep_busy
from pygraph.select.trial import (
    REPLAYED,
    UNCAPTURED,
    Decision,
    Sample,
    Timing,
    Trial,
    choose,
)

Model = dict[str, tuple[float, float]]  # variant -> (host, device) in seconds


def _run(model: Model, noise: float = 0.0, seed: int = 0) -> tuple[Decision, int]:
    """A trial in which calls take the model's times, up to ``noise`` longer at random."""
    memory = {UNCAPTURED: 0, REPLAYED: 1000, "other": 500}
    trial = Trial({name: memory[name] for name in model})
    chance = random.Random(seed)
    for calls in range(1, 100):
        host, device = (t * (1 + noise * chance.random()) for t in model[trial.variant])
        if trial.sleep > 0:
            assert trial.sleep >= host / (1 + noise)
            sample = Sample(host, device=device)
        else:
            sample = Sample(host, latency=max(host, device) + 0.1 * min(host, device))
        decision = trial.add(sample)
        if decision is not None:
            return decision, calls
    raise AssertionError("no decision")


def test_a_graph_that_removes_launch_time_is_selected_soon() -> None:
    decision, calls = _run({UNCAPTURED: (5e-3, 1e-3), REPLAYED: (0.1e-3, 1e-3)})
    assert decision.selected == REPLAYED
    assert calls == 6


def test_a_graph_that_gains_nothing_is_given_up() -> None:
    """The GPU is the limit: less work for the host only makes it wait longer."""
    decision, calls = _run({UNCAPTURED: (2e-3, 20e-3), REPLAYED: (1.9e-3, 20e-3)})
    assert decision.selected == UNCAPTURED
    assert calls == 18


def test_a_slower_graph_is_given_up() -> None:
    decision, calls = _run({UNCAPTURED: (20e-6, 100e-6), REPLAYED: (20e-6, 120e-6)})
    assert decision.selected == UNCAPTURED
    assert calls == 10


@pytest.mark.parametrize(("seconds", "slept"), [(0.0, None), (0.01, 0.01), (60.0, 0.1)])
def test_the_gpu_is_never_kept_busy_for_long(
    monkeypatch: pytest.MonkeyPatch, seconds: float, slept: float | None
) -> None:
    cycles: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append)
    keep_busy(seconds)
    assert cycles == ([] if slept is None else [int(slept * 2e9)])


def test_of_equal_periods_the_smaller_latency_is_selected() -> None:
    decision, _ = _run({UNCAPTURED: (1.0e-3, 1.5e-3), REPLAYED: (0.1e-3, 1.5e-3)})
    assert decision.timings[UNCAPTURED].period == decision.timings[REPLAYED].period
    assert decision.selected == REPLAYED


def test_among_three_the_cheapest_of_the_equal_ones_is_selected() -> None:
    decision, _ = _run({UNCAPTURED: (3e-3, 1e-3), REPLAYED: (0.1e-3, 1e-3), "other": (0.1e-3, 1e-3)})
    assert decision.selected == "other"


def test_a_selection_is_never_much_worse_than_the_best() -> None:
    chance = random.Random(1)
    for seed in range(500):
        names = [UNCAPTURED, REPLAYED, "other"][: chance.choice([2, 3])]
        model = {n: (10 ** chance.uniform(-5, -2), 10 ** chance.uniform(-5, -2)) for n in names}
        decision, calls = _run(model, noise=0.05, seed=seed)
        assert calls <= 9 * len(names)
        best = min(max(times) for times in model.values())
        assert max(model[decision.selected]) <= 1.11 * best


@pytest.mark.parametrize(
    ("graph", "expected"),
    [(0.995, UNCAPTURED), (0.98, REPLAYED)],
)
def test_a_difference_below_one_percent_is_none(graph: float, expected: str) -> None:
    def timing(scale: float, noise: float, memory: int) -> Timing:
        return Timing(1e-4, 1e-2 * scale, 1e-2 * scale, noise, memory)

    timings = {UNCAPTURED: timing(1.0, 0.02, 0), REPLAYED: timing(graph, 0.0, 1)}
    assert choose(timings) == expected
