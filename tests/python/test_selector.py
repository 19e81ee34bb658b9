"""Trials and decisions of a partition, on a made-up engine and clock; no GPU needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraph import decisions, device_patching, gpu_memory, runtime, selector
from pygraph.entry import Entry, Form, State
from pygraph.selection import PATCHED_ON_DEVICE, REPLAYED, UNCAPTURED, Decision, Sample
from pygraph.selector import Selector


class _Partition:
    """What a selector needs of a partition."""

    info = SimpleNamespace(name="forward", device=0, program="program")

    def __init__(self) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.callable = object()
        self.kept: list[Any] = []
        self.refused = ""

    def uncaptured(self, args: list[Any]) -> list[Any]:
        return [args[0], UNCAPTURED]

    def keep(self, graph: Any, calls_per_look: int) -> None:
        self.kept.append((graph, calls_per_look))

    def refuse(self, entry: Entry, reason: str) -> None:
        entry.state, self.refused = State.REFUSED, reason
        entry.graph = entry.trial = None

    def moving(self, args: list[Any]) -> list[int]:
        return []

    written: frozenset[int] = frozenset()


class _Graph:
    workspace_bytes, fixed_bytes = 100, 0
    output_bytes = block_bytes = 0
    error: Exception | None = None
    settled = 0
    released = 0
    nodes_on_device = 0
    device_patch_bytes = 7
    is_patched_on_device = False
    replays = nodes_touched = 0
    dropped = 0

    def patch_on_device(self, on_device: bool) -> None:
        self.is_patched_on_device = on_device

    def drop_other_patching(self) -> None:
        self.dropped += 1

    def settle_workspace(self) -> None:
        self.settled += 1

    def release_workspace(self) -> None:
        self.released += 1

    def replay(self, args: list[Any], gives_away: bool) -> list[Any]:
        if self.error is not None:
            raise self.error
        return [args[0], PATCHED_ON_DEVICE if self.is_patched_on_device else REPLAYED]


class _Busy(RuntimeError):
    """The engine's WorkspaceBusy."""


class _Kept(RuntimeError):
    """The engine's NotGivenAway."""


class _World:
    """The clock: seconds that each variant takes, on the host and on the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = {UNCAPTURED: (5e-3, 1e-3), REPLAYED: (1e-4, 1e-3)}
        self.disk: dict[str, Decision] = {}
        self.without_graph: list[int] = []
        self.removed: list[Any] = []
        self.workspaces_freed = 0
        self.caches_emptied = 0
        engine = SimpleNamespace(
            WorkspaceBusy=_Busy,
            NotGivenAway=_Kept,
            add_without_graph=lambda callable, args, looks: self.without_graph.append(looks),
            clear_without_graph=lambda callable: None,
            remove_graph=lambda callable, graph: self.removed.append(graph),
        )
        monkeypatch.setattr(runtime, "engine", lambda: engine)
        monkeypatch.setattr(selector, "timed", self._timed)
        monkeypatch.setattr(gpu_memory, "free_library_workspaces", self._free_workspaces)
        monkeypatch.setattr(gpu_memory, "give_back_all", self._empty_cache)
        monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
        monkeypatch.setattr(decisions, "key_of", lambda program, key, device: "key")
        monkeypatch.setattr(decisions, "load", self.disk.get)
        monkeypatch.setattr(decisions, "save", self.disk.__setitem__)
        monkeypatch.setattr(decisions, "forget", lambda key: self.disk.pop(key, None))

    def _free_workspaces(self) -> None:
        self.workspaces_freed += 1

    def _empty_cache(self) -> None:
        self.caches_emptied += 1

    def _timed(self, run: Callable[[], list[Any]], sleep: float) -> tuple[list[Any], Sample]:
        result = run()
        host, device = self.times[result[1]]
        if sleep > 0:
            return result, Sample(host, device=device)
        return result, Sample(host, latency=max(host, device))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> _World:
    return _World(monkeypatch)


def _captured(mode: str = "auto") -> tuple[_Partition, Selector, Entry]:
    """A partition whose one signature has just been captured."""
    partition = _Partition()
    subject = Selector(partition, mode)  # type: ignore[arg-type]
    entry = partition.entries[b"key"] = Entry(graph=_Graph(), state=State.CAPTURED)
    subject.recall(b"key", entry)
    subject.captured(entry)
    return partition, subject, entry


def _try_to_the_end(subject: Selector, entry: Entry) -> int:
    for calls in range(100):
        if entry.state is not State.MEASURING:
            return calls
        assert subject.run(b"key", entry, [calls])[0] == calls
    raise AssertionError("no decision")


def test_a_graph_that_wins_its_trial_is_kept_and_remembered(world: _World) -> None:
    partition, subject, entry = _captured()
    assert (entry.state, partition.kept) == (State.MEASURING, [])
    _try_to_the_end(subject, entry)
    assert entry.state is State.CAPTURED
    assert partition.kept == [(entry.graph, selector._CALLS_PER_LOOK)]
    assert entry.graph.settled == 1
    assert world.disk["key"].selected == REPLAYED
    assert world.workspaces_freed == 1  # of the uncaptured calls, after the trial


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_what_compilation_left_is_given_back_once(world: _World, mode: str) -> None:
    _, subject, entry = _captured(mode)
    _try_to_the_end(subject, entry)
    assert world.caches_emptied == 1
    for _ in range(2):  # further shapes
        later = Entry(graph=_Graph(), state=State.CAPTURED)
        subject.captured(later)
        _try_to_the_end(subject, later)
    assert world.caches_emptied == 1


def test_each_call_of_a_trial_finds_room_for_a_graph(
    world: _World, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[int] = []
    monkeypatch.setattr(gpu_memory, "make_room", wanted.append)
    _, subject, entry = _captured()
    entry.graph.output_bytes, entry.graph.block_bytes = 2000, 30
    calls = _try_to_the_end(subject, entry)
    assert wanted == [2130] * calls
    assert entry.graph.released == 0


def test_a_graph_keeps_nothing_from_uncaptured_calls_where_there_is_no_room(
    world: _World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_memory, "make_room", lambda wanted: True)
    _, subject, entry = _captured()
    variants = []
    while entry.trial is not None:
        variants.append(entry.trial.variant)
        subject.run(b"key", entry, [0])
    assert 0 < entry.graph.released == variants.count(UNCAPTURED) < len(variants)


def test_a_trial_ends_where_replays_find_no_memory(world: _World) -> None:
    partition, subject, entry = _captured()
    graph = entry.graph
    graph.error = torch.OutOfMemoryError("no")
    calls = 0
    while entry.state is State.MEASURING:
        assert subject.run(b"key", entry, [calls]) == [calls, UNCAPTURED]
        calls += 1
    assert partition.refused == "its replays ran out of memory"
    assert graph.released == 3
    assert calls <= 4  # each such call empties the allocator's caches


def test_memory_at_fixed_addresses_counts_in_a_trial(
    world: _World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Graph, "fixed_bytes", 40)
    _, subject, entry = _captured()
    _try_to_the_end(subject, entry)
    assert entry.decision is not None
    memory = {name: timing.memory for name, timing in entry.decision.timings.items()}
    assert memory == {UNCAPTURED: 0, REPLAYED: 140}


def test_a_decision_is_not_of_another_form(world: _World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying what was to keep its address takes longer; what cannot be relocated, a program learns
    anew each time."""
    signatures: list[bytes] = []
    monkeypatch.setattr(
        decisions, "key_of", lambda program, key, device: signatures.append(key) or "key"
    )
    for form in Form:
        Selector(_Partition(), "auto").recall(b"key", Entry(form=form))  # type: ignore[arg-type]
    assert signatures[0] == signatures[1] != signatures[2]


@pytest.fixture
def moved_input(world: _World, monkeypatch: pytest.MonkeyPatch) -> tuple[_Partition, Selector, Entry]:
    """A graph that was selected, many of whose nodes a call touches."""
    world.times[PATCHED_ON_DEVICE] = (5e-5, 9e-4)
    monkeypatch.setattr(device_patching, "prove", lambda graph, args, moving, written: "")
    partition, subject, entry = _captured()
    entry.graph.nodes_on_device = 300
    _try_to_the_end(subject, entry)
    entry.graph.replays, entry.graph.nodes_touched = 50, 50 * 300
    return partition, subject, entry


def test_a_graph_that_touches_many_nodes_is_tried_on_the_device(
    world: _World, moved_input: tuple[_Partition, Selector, Entry]
) -> None:
    partition, subject, entry = moved_input
    assert partition.kept == [(entry.graph, selector._CALLS_UNTIL_COUNT)]
    assert subject.look(b"key", entry, [5])[0] == 5
    assert (entry.state, world.removed) == (State.MEASURING, [entry.graph, entry.graph])
    _try_to_the_end(subject, entry)
    assert (entry.state, entry.graph.is_patched_on_device, entry.graph.dropped) == (
        State.CAPTURED,
        True,
        1,
    )
    decision = world.disk["key"]
    assert decision.selected == PATCHED_ON_DEVICE
    assert set(decision.timings) == {UNCAPTURED, REPLAYED, PATCHED_ON_DEVICE}
    memory = {name: timing.memory for name, timing in decision.timings.items()}
    assert memory[PATCHED_ON_DEVICE] == memory[REPLAYED] + 7
    assert partition.kept[-1] == (entry.graph, selector._CALLS_PER_LOOK)
    assert subject.look(b"key", entry, [6]) == [6, PATCHED_ON_DEVICE]
    assert entry.state is State.CAPTURED  # once is enough


def test_the_host_goes_on_patching_where_the_device_gains_nothing(
    world: _World, moved_input: tuple[_Partition, Selector, Entry]
) -> None:
    world.times[PATCHED_ON_DEVICE] = world.times[REPLAYED]
    _, subject, entry = moved_input
    subject.look(b"key", entry, [5])
    _try_to_the_end(subject, entry)
    assert (entry.graph.is_patched_on_device, entry.graph.dropped) == (False, 1)
    assert world.disk["key"].selected == REPLAYED
    assert subject.look(b"key", entry, [6]) == [6, REPLAYED]
    assert entry.state is State.CAPTURED


def test_a_graph_that_touches_few_nodes_is_not_tried(
    world: _World, moved_input: tuple[_Partition, Selector, Entry]
) -> None:
    _, subject, entry = moved_input
    entry.graph.nodes_touched = 50 * (device_patching.MANY_NODES - 1)
    assert subject.look(b"key", entry, [5]) == [5, REPLAYED]
    # Later, its calls come with other tensors.
    entry.graph.replays += 1000
    entry.graph.nodes_touched += 1000 * 2 * device_patching.MANY_NODES
    subject.look(b"key", entry, [6])
    assert entry.state is State.MEASURING


def test_what_a_trial_could_not_tell_is_not_tried(
    world: _World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 nodes take the host 150 us at most."""
    world.times[REPLAYED], world.times[UNCAPTURED] = (1e-4, 16e-3), (1e-1, 16e-3)
    monkeypatch.setattr(device_patching, "prove", None)
    _, subject, entry = _captured()
    entry.graph.nodes_on_device = 300
    _try_to_the_end(subject, entry)
    entry.graph.replays, entry.graph.nodes_touched = 50, 50 * 300
    assert subject.look(b"key", entry, [5]) == [5, REPLAYED]
    assert entry.state is State.CAPTURED


def test_what_the_device_does_not_do_right_is_left_to_the_host(
    moved_input: tuple[_Partition, Selector, Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, subject, entry = moved_input
    monkeypatch.setattr(device_patching, "prove", lambda *args: "it has other results")
    for _ in range(2):
        assert subject.look(b"key", entry, [5]) == [5, REPLAYED]
    assert entry.state is State.CAPTURED


def test_a_form_that_cannot_be_left_again_ends_uncaptured(
    world: _World,
    moved_input: tuple[_Partition, Selector, Entry],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    partition, subject, entry = moved_input
    graph = entry.graph

    def fail(*args: Any) -> str:
        raise RuntimeError("no")

    monkeypatch.setattr(device_patching, "prove", fail)
    assert subject.look(b"key", entry, [5]) == [5, UNCAPTURED]
    assert (entry.state, partition.refused) == (State.REFUSED, "RuntimeError: no")
    assert world.removed[-1] is graph

    partition, subject, entry = _captured()
    _try_to_the_end(subject, entry)
    monkeypatch.setattr(_Graph, "patch_on_device", fail)
    device_patching.settle(partition, entry, REPLAYED)  # type: ignore[arg-type]
    assert entry.state is State.REFUSED


def test_patching_on_the_device_is_remembered_on_disk(
    world: _World, moved_input: tuple[_Partition, Selector, Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, subject, entry = moved_input
    subject.look(b"key", entry, [5])
    _try_to_the_end(subject, entry)
    monkeypatch.setattr(
        device_patching, "prove", lambda graph, *args: graph.patch_on_device(True) or ""
    )
    _, subject, entry = _captured()
    entry.graph.nodes_on_device = 300
    assert (entry.state, entry.graph.is_patched_on_device) == (State.CAPTURED, False)
    subject.look(b"key", entry, [5])  # of few calls, whatever they touched
    assert (entry.state, entry.graph.is_patched_on_device) == (State.CAPTURED, True)
    assert entry.graph.dropped == 1


def test_a_graph_that_loses_is_given_up(world: _World) -> None:
    world.times[REPLAYED] = (1e-4, 6e-3)
    partition, subject, entry = _captured()
    _try_to_the_end(subject, entry)
    assert (entry.state, entry.graph, partition.kept) == (State.NOT_SELECTED, None, [])
    assert (
        world.caches_emptied == world.workspaces_freed == 0
    )  # the program goes on with the same pieces
    assert "6000 us per call, uncaptured 5000 us" in entry.reason


@pytest.mark.parametrize("mode", ["always", "never"])
def test_without_auto_nothing_is_tried(world: _World, mode: str) -> None:
    partition, _, entry = _captured(mode)
    assert partition.kept == [(entry.graph, 0)]
    assert world.workspaces_freed == 1
    assert world.disk == {}
    fresh = Entry()
    Selector(partition, mode).recall(b"other", fresh)  # type: ignore[arg-type]
    assert fresh.state is (State.NOT_SELECTED if mode == "never" else State.UNCAPTURED)


def test_a_decision_from_disk_needs_no_trial(world: _World) -> None:
    _, subject, entry = _captured()
    _try_to_the_end(subject, entry)
    partition, _, again = _captured()
    assert (again.state, len(partition.kept)) == (State.CAPTURED, 1)
    world.disk["key"] = Decision(UNCAPTURED, world.disk["key"].timings)
    fresh = Entry()
    subject.recall(b"key", fresh)
    assert fresh.state is State.NOT_SELECTED


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (torch.OutOfMemoryError("no"), State.MEASURING),
        (_Busy("no"), State.MEASURING),
        (_Kept("no"), State.MEASURING),
        (RuntimeError("no"), State.REFUSED),
    ],
)
def test_a_replay_that_fails_leaves_the_call_uncaptured(
    world: _World, error: Exception, state: State
) -> None:
    _, subject, entry = _captured()
    entry.graph.error = error
    for i in range(3):
        if entry.state is State.MEASURING:
            assert subject.run(b"key", entry, [i]) == [i, UNCAPTURED]
    assert entry.state is state


def test_after_three_graphs_further_shapes_need_no_trial(world: _World) -> None:
    partition, subject, entry = _captured()
    for _ in range(selector._AGREEING_TRIALS):
        assert entry.state is State.MEASURING
        _try_to_the_end(subject, entry)
        entry = Entry(graph=_Graph(), state=State.CAPTURED)
        subject.captured(entry)
        partition.entries[b"key"] = entry
    assert entry.state is State.CAPTURED


def test_a_graph_whose_time_leaves_the_band_is_tried_again(world: _World) -> None:
    _, subject, entry = _captured()
    _try_to_the_end(subject, entry)
    for _ in range(5):
        subject.look(b"key", entry, [0])
    assert entry.state is State.CAPTURED
    world.times[REPLAYED] = (1e-4, 9e-3)
    looks = 0
    while entry.state is State.CAPTURED:
        subject.look(b"key", entry, [0])
        looks += 1
    assert (looks, entry.state) == (selector._LOOKS_OUTSIDE, State.MEASURING)
    assert world.removed == [entry.graph] * 2  # for each trial
    assert world.disk == {}
    _try_to_the_end(subject, entry)
    assert entry.state is State.NOT_SELECTED


def test_an_uncaptured_decision_whose_time_leaves_the_band_is_forgotten(world: _World) -> None:
    world.times[UNCAPTURED] = (1e-4, 1e-3)
    partition, subject, entry = _captured()
    _try_to_the_end(subject, entry)
    assert entry.state is State.NOT_SELECTED
    subject.look(b"key", entry, [0])  # makes it known to the engine
    assert world.without_graph == [selector._CALLS_PER_LOOK]
    world.times[UNCAPTURED] = (9e-3, 1e-3)
    for _ in range(selector._LOOKS_OUTSIDE):
        assert b"key" in partition.entries
        assert subject.look(b"key", entry, [0]) == [0, UNCAPTURED]
    assert partition.entries == {}


def test_a_look_beside_another_thread_runs_uncaptured_and_stays_due(world: _World) -> None:
    partition, subject, entry = _captured()
    _try_to_the_end(subject, entry)
    kept = list(partition.kept)
    with runtime.record_lock:
        assert subject.look(b"key", entry, [5]) == [5, UNCAPTURED]
    assert partition.kept == kept
    assert subject.look(b"key", entry, [5]) == [5, REPLAYED]


def test_a_refused_signature_is_never_timed(world: _World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selector, "timed", None)
    _, subject, entry = _captured()
    entry.state, entry.decision = State.REFUSED, None
    for i in range(3):
        assert subject.look(b"key", entry, [i]) == [i, UNCAPTURED]
    assert world.without_graph == [0]  # the engine is told once
