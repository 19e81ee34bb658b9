"""Which graphs are tried on the device, and what becomes of them; no GPU needed."""

from __future__ import annotations

from typing import Any

import pytest

from pygraph.partition import device_patching, selector
from pygraph.partition.selector import Selector
from pygraph.partition.signature import Entry, State
from pygraph.select.trial import PATCHED_ON_DEVICE, REPLAYED, UNCAPTURED

from .fake_engine import FakeGraph
from .selector_world import FakePartition, World, captured, graph_of, try_to_the_end


@pytest.fixture
def moved_input(world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[FakePartition, Selector, Entry]:
    """A graph that was selected, many of whose nodes a call touches."""
    world.times[PATCHED_ON_DEVICE] = (5e-5, 9e-4)
    monkeypatch.setattr(device_patching, "prove", lambda graph, args, moving, written: "")
    partition, subject, entry = captured()
    graph_of(entry).nodes_on_device = 300
    try_to_the_end(subject, entry)
    graph_of(entry).replays, graph_of(entry).nodes_touched = 50, 50 * 300
    return partition, subject, entry


def test_a_graph_that_touches_many_nodes_is_tried_on_the_device(
    world: World, moved_input: tuple[FakePartition, Selector, Entry]
) -> None:
    partition, subject, entry = moved_input
    assert partition.installed == [(entry.graph, selector._CALLS_UNTIL_COUNT)]
    assert subject.recheck(b"key", entry, [5])[0] == 5
    assert (entry.state, world.removed) == (State.MEASURING, [entry.graph, entry.graph])
    try_to_the_end(subject, entry)
    assert (entry.state, graph_of(entry).is_patched_on_device, graph_of(entry).dropped) == (
        State.CAPTURED,
        True,
        1,
    )
    decision = world.disk["key"]
    assert decision.selected == PATCHED_ON_DEVICE
    assert set(decision.timings) == {UNCAPTURED, REPLAYED, PATCHED_ON_DEVICE}
    memory = {name: timing.memory for name, timing in decision.timings.items()}
    assert memory[PATCHED_ON_DEVICE] == memory[REPLAYED] + 7
    assert partition.installed[-1] == (entry.graph, selector._CALLS_PER_RECHECK)
    assert subject.recheck(b"key", entry, [6]) == [6, PATCHED_ON_DEVICE]
    assert entry.state is State.CAPTURED  # once is enough


def test_the_host_goes_on_patching_where_the_device_gains_nothing(
    world: World, moved_input: tuple[FakePartition, Selector, Entry]
) -> None:
    world.times[PATCHED_ON_DEVICE] = world.times[REPLAYED]
    _, subject, entry = moved_input
    subject.recheck(b"key", entry, [5])
    try_to_the_end(subject, entry)
    assert (graph_of(entry).is_patched_on_device, graph_of(entry).dropped) == (False, 1)
    assert world.disk["key"].selected == REPLAYED
    assert subject.recheck(b"key", entry, [6]) == [6, REPLAYED]
    assert entry.state is State.CAPTURED


def test_a_graph_that_touches_few_nodes_is_not_tried(
    world: World, moved_input: tuple[FakePartition, Selector, Entry]
) -> None:
    _, subject, entry = moved_input
    graph_of(entry).nodes_touched = 50 * (device_patching.MANY_NODES - 1)
    assert subject.recheck(b"key", entry, [5]) == [5, REPLAYED]
    # Later, its calls come with other tensors.
    graph_of(entry).replays += 1000
    graph_of(entry).nodes_touched += 1000 * 2 * device_patching.MANY_NODES
    subject.recheck(b"key", entry, [6])
    assert entry.state is State.MEASURING


def test_what_a_trial_could_not_tell_is_not_tried(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 nodes take the host 150 us at most."""
    world.times[REPLAYED], world.times[UNCAPTURED] = (1e-4, 16e-3), (1e-1, 16e-3)
    monkeypatch.setattr(device_patching, "prove", None)
    _, subject, entry = captured()
    graph_of(entry).nodes_on_device = 300
    try_to_the_end(subject, entry)
    graph_of(entry).replays, graph_of(entry).nodes_touched = 50, 50 * 300
    assert subject.recheck(b"key", entry, [5]) == [5, REPLAYED]
    assert entry.state is State.CAPTURED


def test_what_the_device_does_not_do_right_is_left_to_the_host(
    moved_input: tuple[FakePartition, Selector, Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, subject, entry = moved_input
    monkeypatch.setattr(device_patching, "prove", lambda *args: "it has other results")
    for _ in range(2):
        assert subject.recheck(b"key", entry, [5]) == [5, REPLAYED]
    assert entry.state is State.CAPTURED


def test_a_form_that_cannot_be_left_again_ends_uncaptured(
    world: World,
    moved_input: tuple[FakePartition, Selector, Entry],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    partition, subject, entry = moved_input
    graph = entry.graph

    def fail(*args: Any) -> str:
        raise RuntimeError("no")

    monkeypatch.setattr(device_patching, "prove", fail)
    assert subject.recheck(b"key", entry, [5]) == [5, UNCAPTURED]
    assert (entry.state, partition.refused) == (State.REFUSED, "RuntimeError: no")
    assert world.removed[-1] is graph

    partition, subject, entry = captured()
    try_to_the_end(subject, entry)
    monkeypatch.setattr(FakeGraph, "patch_on_device", fail)
    device_patching.settle(partition, entry, REPLAYED)  # type: ignore[arg-type]
    assert entry.state is State.REFUSED


def test_patching_on_the_device_is_remembered_on_disk(
    world: World, moved_input: tuple[FakePartition, Selector, Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, subject, entry = moved_input
    subject.recheck(b"key", entry, [5])
    try_to_the_end(subject, entry)
    monkeypatch.setattr(
        device_patching, "prove", lambda graph, *args: graph.patch_on_device(True) or ""
    )
    _, subject, entry = captured()
    graph_of(entry).nodes_on_device = 300
    assert (entry.state, graph_of(entry).is_patched_on_device) == (State.CAPTURED, False)
    subject.recheck(b"key", entry, [5])  # of few calls, whatever they touched
    assert (entry.state, graph_of(entry).is_patched_on_device) == (State.CAPTURED, True)
    assert graph_of(entry).dropped == 1
