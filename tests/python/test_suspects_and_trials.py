"""Graphs that are suspected, and trials and recordings that cannot go on: each comes to an end."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pygraph.partition import pipeline
from pygraph.partition.attempt import Attempt, verify_and_call
from pygraph.partition.call import Call
from pygraph.partition.signature import Pending, State
from pygraph.record.recorder import Recording
from pygraph.verify.rehearsal import Rehearsal

from .audit_world import Graph, World, only_entry
from .fake_engine import StandIns
from .many_graphs import for_many_sizes, inputs, world_without_times, wrong, wrong_results


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return world_without_times(monkeypatch)


def test_calls_that_could_not_be_compared_count_for_one_suspicion(world: World) -> None:
    partition = world.partition(inputs, audit=10)
    entry = only_entry(partition)
    for _ in range(10):
        world.graph.function = wrong  # left to chance
        world.graph.audit_at = 0
        partition.callable(inputs())
        world.graph.function = world.function
        entry.audits.visible = [7]  # as if the call had other written inputs
        partition.callable(inputs())
        entry.audits.visible = []
        partition.callable(inputs())
        assert only_entry(partition) is entry
        assert not entry.audits.suspects


def test_a_recording_that_waits_for_another_call_is_given_up_if_none_comes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has donated memory, and all further calls are on a stream that the program may destroy."""
    partition = world.partition(inputs)
    entry = only_entry(partition)
    entry.begin_anew()
    world.engine.graphs.clear()
    graph = Graph(world.function)
    graph.donated = [0]
    graph.error = world.engine.NotGivenAway("not on this stream")
    entry.recording.pending = Pending(Recording(graph, StandIns(), []), [0], 0)  # type: ignore[arg-type]
    entry.recording.wait_seconds = math.inf

    def attempt(call: Call) -> Attempt:
        if call.pending is None:
            return Attempt(call.uncaptured(call.args), Graph(world.function))
        return verify_and_call(call.pending.recording, call, frozenset())

    monkeypatch.setattr(pipeline, "attempt", attempt)
    assert wrong_results(partition, 50) == 0
    assert entry.state is State.CAPTURED


def test_a_suspected_graph_whose_calls_have_other_results_is_recorded_anew(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The recording of another signature has shown that the function writes a further input."""
    state = torch.zeros(3)
    partition = world.partition(lambda: [torch.zeros(4), state], audit=10)
    entry = only_entry(partition)
    world.graph.function = wrong
    world.graph.audit_at = 0
    partition.callable([torch.zeros(4), state])
    assert entry.audits.suspects
    partition._effects.note_written(frozenset({1}))
    for _ in range(8):
        assert partition.callable([torch.zeros(4), state])[0].tolist() == [1] * 4
    assert partition.entries[b"key"] is not entry
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "an audit found result 0 to differ" in warning


def test_a_suspected_graph_that_makes_room_for_others_is_reported(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"audit": 10, "select": "always", "max_graphs": 1}
    partition, graphs = for_many_sizes(world, monkeypatch, **options)
    for _ in range(3):
        partition.callable(inputs(4))
    graphs[4].function = wrong
    graphs[4].audit_at = 0
    partition.callable(inputs(4))
    assert partition.entries[b"4"].audits.suspects
    for _ in range(3):
        partition.callable(inputs(5))
    assert b"4" not in partition.entries
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "an audit found result 0 to differ" in warning


def test_graphs_whose_trial_does_not_end_make_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition, _ = for_many_sizes(world, monkeypatch, select="auto", max_graphs=4)
    for _ in range(4):
        for size in range(1, 65):
            partition.callable(inputs(size))
    assert sum(entry.graph is not None for entry in partition.entries.values()) == 8


@pytest.mark.parametrize("name", ["NotGivenAway", "StreamNotReady"])
def test_a_trial_without_a_replay_ends(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each of its calls would wait for the stream."""
    partition, graphs = for_many_sizes(world, monkeypatch, select="auto")
    for _ in range(2):
        partition.callable(inputs())
    error = getattr(world.engine, name)("not in this call")
    tries = 0

    def replay(*parts: Any) -> None:
        nonlocal tries
        tries += 1
        raise error

    monkeypatch.setattr(graphs[4], "replay", replay)
    entry = only_entry(partition)
    while entry.state is State.MEASURING and tries < 100:
        assert wrong_results(partition, 1) == 0
    assert (entry.state, tries, entry.calls_until_retry) == (State.REFUSED, 50, 1000)
    assert "one after the other: not in this call" in entry.reason


def test_a_recheck_waits_for_a_call_that_fits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    partition = world.partition(inputs, audit=0)
    selection = only_entry(partition).selection
    world.graph.donated = [0]
    fits = True
    monkeypatch.setattr(world.graph, "gives_away", lambda args: fits, raising=False)
    partition.install(world.graph, 10)  # type: ignore[arg-type]
    for _ in range(10):
        partition.callable(inputs())
    fits = False
    partition.callable(inputs())
    assert selection.rechecks == 0
    fits = True
    partition.callable(inputs())
    assert selection.rechecks == 1


def test_a_suspect_in_a_call_that_gives_nothing_away_is_checked_in_a_later_one(world: World) -> None:
    partition = world.partition(inputs, audit=10)
    entry = only_entry(partition)
    world.graph.function = wrong  # once: results left to chance
    world.graph.audit_at = 0
    partition.callable(inputs())
    assert entry.audits.suspects
    world.graph.function = world.function
    world.graph.error = world.engine.NotGivenAway("somebody holds an argument")
    partition.callable(inputs())
    world.graph.error = None
    assert (entry.state, bool(entry.audits.suspects)) == (State.CAPTURED, True)
    partition.callable(inputs())
    assert (entry.state, entry.audits.failed, entry.audits.suspects) == (State.CAPTURED, 0, ())


def test_memory_that_is_short_after_the_call_does_not_reach_the_program(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result on the CPU, or one whose readers conjugate it, is copied to be compared."""
    partition = world.partition(inputs, audit=10)
    world.graph.function = wrong
    world.graph.audit_at = 0
    partition.callable(inputs())
    assert only_entry(partition).audits.suspects

    def results_of_call(self: Rehearsal, outputs: Sequence[Any]) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Rehearsal, "results_of_call", results_of_call)
    assert wrong_results(partition, 1) == 0
