"""Audits that may not wait: no replay serves a call before they are made."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import Any

import pytest
import torch

from pygraph import runtime
from pygraph.partition.signature import State
from pygraph.select import decision_cache
from pygraph.select.trial import REPLAYED, UNCAPTURED, Decision, Timing

from . import audit_world
from .audit_world import World, only_entry
from .contexts import recording
from .many_graphs import for_many_sizes, inputs, world_without_times, wrong, wrong_results


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return world_without_times(monkeypatch)


def test_where_each_call_is_audited_none_is_replayed_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition, graphs = for_many_sizes(world, monkeypatch, audit=1, select="auto")
    for _ in range(2):
        partition.callable(inputs())
    assert only_entry(partition).state is State.CAPTURED  # without a trial
    graphs[4].function = wrong
    assert wrong_results(partition, 40) == 0
    assert only_entry(partition).state is State.REFUSED


def test_after_a_drop_a_graph_on_trial_is_audited_at_its_next_call(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition, graphs = for_many_sizes(world, monkeypatch, audit=10, select="auto")
    for _ in range(2):
        partition.callable(inputs(4))
    known = partition.entries[b"4"]
    known.use(graphs[4])  # as after its trial
    known.selection.trial = None
    partition.install(graphs[4], 0)
    for _ in range(2):
        partition.callable(inputs(5))
    assert partition.entries[b"5"].state is State.MEASURING
    for graph in graphs.values():
        graph.function = wrong
    graphs[4].audit_at = 0
    for _ in range(2):  # the audit, and the thorough check
        partition.callable(inputs(4))
    assert known.state is State.REFUSED
    with recording():  # by another thread: it is still due afterwards
        assert wrong_results(partition, 3, size=5) == 0
    assert wrong_results(partition, 30, size=5) == 0
    assert partition.entries[b"5"].state is State.REFUSED


@pytest.mark.parametrize("is_profiled", [False, True])
def test_the_first_calls_are_compared_before_others_are_replayed(
    world: World, monkeypatch: pytest.MonkeyPatch, is_profiled: bool
) -> None:
    """Also if another thread records, or a profiler is active, at the time."""
    info = dataclasses.replace(audit_world.INFO, compared_calls=2)
    monkeypatch.setattr(audit_world, "INFO", info)
    partition = world.partition(inputs)
    world.graph.function = wrong
    with monkeypatch.context() as meanwhile:
        if is_profiled:
            meanwhile.setattr(torch.autograd.profiler, "_is_profiler_enabled", True)
            assert wrong_results(partition, 3) == 0
        else:
            with recording():
                assert wrong_results(partition, 3) == 0
    assert wrong_results(partition, 3) == 0
    assert only_entry(partition).state is State.REFUSED


@pytest.mark.parametrize("is_profiled", [False, True])
def test_after_a_drop_a_graph_in_use_is_audited_before_others_are_replayed(
    world: World, monkeypatch: pytest.MonkeyPatch, is_profiled: bool
) -> None:
    partition, graphs = for_many_sizes(world, monkeypatch, audit=1000, select="always")
    for size in (4, 5):
        for _ in range(3):
            partition.callable(inputs(size))
    for graph in graphs.values():
        graph.function = wrong
    graphs[4].audit_at = 0
    for _ in range(2):
        partition.callable(inputs(4))
    assert partition.entries[b"4"].state is State.REFUSED
    with monkeypatch.context() as meanwhile, contextlib.ExitStack() as stack:
        if is_profiled:
            meanwhile.setattr(torch.autograd.profiler, "_is_profiler_enabled", True)
        else:
            stack.enter_context(recording())
        assert wrong_results(partition, 3, size=5) == 0
    assert wrong_results(partition, 3, size=5) == 0


@pytest.mark.parametrize("is_recheck", [False, True])
def test_a_drop_right_before_a_timed_replay(
    world: World, monkeypatch: pytest.MonkeyPatch, is_recheck: bool
) -> None:
    """Another thread's, before this one has the lock."""
    timing = Timing(1e-3, 1e-3, 1e-3, 0, 0)
    if is_recheck:
        decision = Decision(REPLAYED, {REPLAYED: timing, UNCAPTURED: timing})
        monkeypatch.setattr(decision_cache, "load", lambda key: decision)
    partition, graphs = for_many_sizes(world, monkeypatch, audit=10**6, select="auto")
    for size in (4, 5):
        for _ in range(2):
            partition.callable(inputs(size))
    known, entry = partition.entries[b"4"], partition.entries[b"5"]
    if not is_recheck:
        partition.callable(inputs(5))  # the next one is a replay
        known.use(graphs[4])
        known.selection.trial = None
        partition.install(graphs[4], 0)
    for graph in graphs.values():
        graph.function = wrong
    graphs[4].audit_at = 0
    take, is_first = runtime.record_lock.take, True

    def take_late(undo: Any) -> bool:
        nonlocal is_first
        if is_first:
            is_first = False
            for _ in range(2):
                partition.callable(inputs(4))
            assert known.state is State.REFUSED
        return bool(take(undo))

    monkeypatch.setattr(runtime.record_lock, "take", take_late)
    assert partition._call_as_due(b"5", entry, inputs(5))[0].tolist() == [1] * 5


def test_while_a_first_call_is_compared_no_other_thread_replays(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = dataclasses.replace(audit_world.INFO, compared_calls=2)
    monkeypatch.setattr(audit_world, "INFO", info)
    partition = world.partition(inputs)
    world.graph.function = wrong
    found: list[int] = []

    def function(args: list[Any]) -> list[Any]:
        if threading.current_thread() is threading.main_thread() and not found:
            other = threading.Thread(target=lambda: found.append(wrong_results(partition, 5)))
            other.start()
            other.join()
        return [args[0] + 1]

    world.function = function
    assert wrong_results(partition, 1) == 0
    assert found == [0]


def test_a_busy_call_is_not_replayed_where_each_is_audited(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition, graphs = for_many_sizes(world, monkeypatch, audit=1, select="always")
    for _ in range(4):
        partition.callable(inputs())
    graphs[4].function = wrong
    with recording():
        assert wrong_results(partition, 1) == 0
    assert wrong_results(partition, 20) == 0
