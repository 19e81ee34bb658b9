"""Trials and decisions of a partition, on a made-up engine and clock; no GPU needed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from pygraph.gpu import allocator
from pygraph.partition import selector, timed_calls
from pygraph.partition.selector import Selector
from pygraph.partition.signature import Entry, Kind, State
from pygraph.select import decision_cache
from pygraph.select.trial import REPLAYED, UNCAPTURED, Decision

from .contexts import recording
from .fake_engine import FakeGraph
from .selector_world import (
    Busy,
    FakePartition,
    Kept,
    World,
    captured,
    graph_of,
    made_graph,
    try_to_the_end,
)


def test_a_graph_that_wins_its_trial_is_kept_and_remembered(world: World) -> None:
    partition, subject, entry = captured()
    assert (entry.state, partition.installed) == (State.MEASURING, [])
    try_to_the_end(subject, entry)
    assert entry.state is State.CAPTURED
    assert partition.installed == [(entry.graph, selector._CALLS_PER_RECHECK)]
    assert graph_of(entry).settled == 1
    assert world.disk["key"].selected == REPLAYED
    assert world.workspaces_freed == 1  # of the uncaptured calls, after the trial


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_what_compilation_left_is_given_back_once(world: World, mode: str) -> None:
    _, subject, entry = captured(mode)
    try_to_the_end(subject, entry)
    assert world.caches_emptied == 1
    for _ in range(2):  # further shapes
        later = Entry(graph=made_graph(), state=State.CAPTURED)
        subject.begin_trial_or_install(later)
        try_to_the_end(subject, later)
    assert world.caches_emptied == 1


@pytest.mark.parametrize("mode", ["auto", "always"])
@pytest.mark.parametrize(
    ("kind", "runs_program", "is_held"),
    [
        ("inference", True, True),
        ("inference", False, False),
        ("forward", True, False),
        ("backward", True, False),
    ],
)
def test_only_graphs_of_whole_functions_hold_blocks(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    kind: Kind,
    runs_program: bool,
    is_held: bool,
) -> None:
    asked: list[tuple[object, int]] = []

    def hold_blocks(graph: FakeGraph, device: int) -> None:
        assert graph.settled == 0  # the workspace takes its place with them
        asked.append((graph, device))

    monkeypatch.setattr(allocator, "hold_blocks", hold_blocks)
    _, subject, entry = captured(mode, kind, runs_program)
    assert bool(asked) == (is_held and mode == "always")  # not before the trial's end
    try_to_the_end(subject, entry)
    assert asked == ([(entry.graph, 0)] if is_held else [])
    assert graph_of(entry).settled == 1


def test_each_call_of_a_trial_finds_room_for_a_graph(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[int] = []
    monkeypatch.setattr(allocator, "make_room", lambda size: wanted.append(size) or True)
    _, subject, entry = captured()
    graph_of(entry).output_bytes, graph_of(entry).block_bytes = 2000, 30
    calls = try_to_the_end(subject, entry)
    assert wanted == [2130] * calls
    assert graph_of(entry).released == 0


def test_a_graph_keeps_nothing_from_uncaptured_calls_where_there_is_no_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocator, "make_room", lambda wanted: False)
    _, subject, entry = captured()
    variants = []
    while entry.selection.trial is not None:
        variants.append(entry.selection.trial.variant)
        subject.run_trial_call(b"key", entry, [0])
    assert 0 < graph_of(entry).released == variants.count(UNCAPTURED) < len(variants)


def test_a_trial_ends_where_replays_find_no_memory(world: World) -> None:
    partition, subject, entry = captured()
    graph = graph_of(entry)
    graph.error = torch.OutOfMemoryError("no")
    calls = 0
    while entry.state is State.MEASURING:
        assert subject.run_trial_call(b"key", entry, [calls]) == [calls, UNCAPTURED]
        calls += 1
    assert partition.refused == "its replays ran out of memory"
    assert graph.released == 3
    assert world.blocks_dropped == 3
    assert calls <= 4  # each such call empties the allocator's caches


def test_a_graph_that_loses_is_given_up(world: World) -> None:
    world.times[REPLAYED] = (1e-4, 6e-3)
    partition, subject, entry = captured()
    try_to_the_end(subject, entry)
    assert (entry.state, entry.graph, partition.installed) == (State.NOT_SELECTED, None, [])
    assert (
        world.caches_emptied == world.workspaces_freed == 0
    )  # the program goes on with the same pieces
    assert "6000 us per call, uncaptured 5000 us" in entry.reason


def test_a_graph_that_is_always_wanted_is_not_tried(world: World) -> None:
    partition, _, entry = captured("always")
    assert partition.installed == [(entry.graph, 0)]
    assert world.workspaces_freed == 1
    assert world.disk == {}


@pytest.mark.parametrize("mode", ["always", "never"])
def test_without_auto_nothing_is_asked_of_the_disk(world: World, mode: str) -> None:
    entry = Entry()
    Selector(FakePartition(), mode, 8).load_decision(b"key", entry)  # type: ignore[arg-type]
    assert entry.state is (State.NOT_SELECTED if mode == "never" else State.UNCAPTURED)
    assert entry.selection.cache_key == ""


def test_a_decision_holds_for_its_program_and_its_number_of_lanes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_cache, "key_of", lambda program, key, device: program)
    partition = FakePartition()
    keys = []
    for program in ("", "a", "b"):
        partition.info = SimpleNamespace(name="forward", device=0, program=program)
        for lanes in (1, 8):
            entry = Entry()
            Selector(partition, "auto", lanes).load_decision(b"key", entry)  # type: ignore[arg-type]
            keys.append(entry.selection.cache_key)
    assert keys[:2] == ["", ""]
    assert len(set(keys)) == 5


def test_a_decision_from_disk_needs_no_trial(world: World) -> None:
    _, subject, entry = captured()
    try_to_the_end(subject, entry)
    partition, _, again = captured()
    assert (again.state, len(partition.installed)) == (State.CAPTURED, 1)
    world.disk["key"] = Decision(UNCAPTURED, world.disk["key"].timings)
    fresh = Entry()
    subject.load_decision(b"key", fresh)
    assert fresh.state is State.NOT_SELECTED


@pytest.mark.parametrize(("lanes", "has_branches"), [(1, False), (4, True)])
def test_a_later_process_knows_the_layout_and_the_suspects(
    world: World, lanes: int, has_branches: bool
) -> None:
    _, subject, entry = captured()
    graph_of(entry).lanes = lanes
    entry.recording.have_differed = frozenset({5, 3})
    try_to_the_end(subject, entry)
    assert (world.disk["key"].branches, world.disk["key"].suspects) == (has_branches, (3, 5))


@pytest.mark.parametrize(
    ("found", "known"), [((), (3,)), ((3,), (3,)), ((7,), (3, 7)), ((1, 3), (1, 3))]
)
def test_suspects_that_a_later_process_finds_are_known_to_the_next(
    world: World, found: tuple[int, ...], known: tuple[int, ...]
) -> None:
    _, subject, entry = captured()
    try_to_the_end(subject, entry)
    world.disk["key"] = before = dataclasses.replace(world.disk["key"], suspects=(3,))
    later = Entry(graph=made_graph(), state=State.CAPTURED)
    subject.load_decision(b"key", later)
    later.recording.have_differed = frozenset(found)
    subject.begin_trial_or_install(later)
    assert later.state is State.CAPTURED
    assert world.disk["key"] == dataclasses.replace(before, suspects=known)
    assert (world.disk["key"] is before) == (set(found) <= {3})  # written where it changes only


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (torch.OutOfMemoryError("no"), State.MEASURING),
        (Busy("no"), State.MEASURING),
        (Kept("no"), State.MEASURING),
        (RuntimeError("no"), State.REFUSED),
    ],
)
def test_a_replay_that_fails_leaves_the_call_uncaptured(
    world: World, error: Exception, state: State
) -> None:
    _, subject, entry = captured()
    graph_of(entry).error = error
    for i in range(3):
        if entry.state is State.MEASURING:
            assert subject.run_trial_call(b"key", entry, [i]) == [i, UNCAPTURED]
    assert entry.state is state


def test_after_three_graphs_further_shapes_need_no_trial(world: World) -> None:
    partition, subject, entry = captured()
    for _ in range(selector._AGREEING_TRIALS):
        assert entry.state is State.MEASURING
        try_to_the_end(subject, entry)
        entry = Entry(graph=made_graph(), state=State.CAPTURED)
        subject.begin_trial_or_install(entry)
        partition.entries[b"key"] = entry
    assert entry.state is State.CAPTURED


def test_a_graph_whose_time_leaves_the_band_is_tried_again(world: World) -> None:
    _, subject, entry = captured()
    try_to_the_end(subject, entry)
    for _ in range(5):
        subject.recheck(b"key", entry, [0])
    assert entry.state is State.CAPTURED
    world.times[REPLAYED] = (1e-4, 9e-3)
    rechecks = 0
    while entry.state is State.CAPTURED:
        subject.recheck(b"key", entry, [0])
        rechecks += 1
    assert (rechecks, entry.state) == (selector._MOST_OUT_OF_BAND, State.MEASURING)
    assert world.removed == [entry.graph] * 2  # for each trial
    assert world.disk == {}
    try_to_the_end(subject, entry)
    assert entry.state is State.NOT_SELECTED


def test_an_uncaptured_decision_whose_time_leaves_the_band_is_forgotten(world: World) -> None:
    world.times[UNCAPTURED] = (1e-4, 1e-3)
    partition, subject, entry = captured()
    try_to_the_end(subject, entry)
    assert entry.state is State.NOT_SELECTED
    subject.recheck(b"key", entry, [0])  # makes it known to the engine
    assert world.without_graph == [selector._CALLS_PER_RECHECK]
    world.times[UNCAPTURED] = (9e-3, 1e-3)
    for _ in range(selector._MOST_OUT_OF_BAND):
        assert b"key" in partition.entries
        assert subject.recheck(b"key", entry, [0]) == [0, UNCAPTURED]
    assert partition.entries == {}


def test_a_recheck_beside_another_thread_runs_uncaptured_and_stays_due(world: World) -> None:
    partition, subject, entry = captured()
    try_to_the_end(subject, entry)
    installed = list(partition.installed)
    with recording():
        assert subject.recheck(b"key", entry, [5]) == [5, UNCAPTURED]
    assert partition.installed == installed
    assert subject.recheck(b"key", entry, [5]) == [5, REPLAYED]


def test_a_trial_waits_for_the_end_of_a_profile(world: World) -> None:
    """Replays are slow meanwhile, and the decision would be kept on disk."""
    fast = world.times[REPLAYED]
    _, subject, entry = captured()
    world.is_profiled, world.times[REPLAYED] = True, (9e-3, 1e-3)
    for i in range(20):
        assert subject.run_trial_call(b"key", entry, [i]) == [i, UNCAPTURED]
    assert entry.state is State.MEASURING
    assert world.disk == {}
    world.is_profiled, world.times[REPLAYED] = False, fast
    try_to_the_end(subject, entry)
    assert entry.state is State.CAPTURED


def test_a_replay_under_a_profile_does_not_count_as_a_recheck(world: World) -> None:
    _, subject, entry = captured()
    try_to_the_end(subject, entry)
    world.is_profiled, world.times[REPLAYED] = True, (9e-3, 1e-3)
    for i in range(2 * selector._MOST_OUT_OF_BAND):
        assert subject.recheck(b"key", entry, [i]) == [i, REPLAYED]
    assert entry.state is State.CAPTURED


def test_a_refused_signature_is_never_timed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_calls, "timed", None)
    _, subject, entry = captured()
    entry.state, entry.selection.decision = State.REFUSED, None
    for i in range(3):
        assert subject.recheck(b"key", entry, [i]) == [i, UNCAPTURED]
    assert world.without_graph == [0]  # the engine is told once
