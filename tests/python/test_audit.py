"""Audits of graphs in use, on a made-up engine; no GPU needed."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph
from pygraph import runtime
from pygraph.partition.partition import Partition
from pygraph.partition.signature import Entry, State
from pygraph.verify.rehearsal import POISON_ONES

from .audit_world import Generator, World, only_entry
from .contexts import recording

MakeWorld = Callable[..., World]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch, lambda args: [args[0] + 1])


def _x() -> list[Any]:
    return [torch.arange(4.0)]


def _audited_calls(world: World, partition: Partition, calls: int) -> list[int]:
    """The numbers of the calls that were made uncaptured, of so many, the first one being 1."""
    found = []
    for number in range(1, calls + 1):
        before = world.calls
        (result,) = partition.callable(_x())
        assert result.tolist() == [1, 2, 3, 4]
        if world.calls > before:
            found.append(number)
    return found


@pytest.mark.parametrize("interval", [1, 10])
def test_an_interval_is_kept_to(world: World, interval: int) -> None:
    partition = world.partition(_x, audit=interval)
    calls = list(range(interval, 131, interval))
    assert _audited_calls(world, partition, 130) == sorted({*calls, 100})
    assert only_entry(partition).audits.made == len(calls)


def test_the_first_audits_are_of_calls_100_and_1000(world: World) -> None:
    partition = world.partition(_x)
    assert _audited_calls(world, partition, 1500) == [100, 1000]


def test_each_call_is_one_replay(world: World) -> None:
    partition = world.partition(_x, audit=7)
    before = world.graph.replays
    _audited_calls(world, partition, 50)
    assert world.graph.replays - before == 50
    assert world.graph.poisons.count(POISON_ONES) == 7


@pytest.mark.parametrize("interval", [0, False])
def test_audits_switched_off(world: World, interval: int) -> None:
    partition = world.partition(_x, audit=interval)
    assert _audited_calls(world, partition, 1200) == []
    assert world.graph.audit_at is None


def _row() -> pygraph.GraphStats:
    (row,) = [row for row in pygraph.stats() if row.replays or row.audits]
    return row


@pytest.fixture(autouse=True)
def no_other_partitions() -> None:
    runtime.partitions.clear()


def test_the_report_counts(world: World) -> None:
    partition = world.partition(_x, audit=10)
    assert _row().replays_since_audit == 0
    _audited_calls(world, partition, 25)
    row = _row()
    assert (row.audits, row.audits_failed, row.audits_skipped) == (2, 0, 0)
    assert row.replays_since_audit == 5


def test_a_graph_that_has_become_wrong_is_dropped(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    partition = world.partition(_x, audit=10)
    entry = only_entry(partition)
    other = partition.entries[b"other"] = Entry(State.CAPTURED, graph=type(world.graph)(world.function))
    _audited_calls(world, partition, 15)
    world.graph.function = lambda args: [args[0] + 2]
    for _ in range(4):
        assert partition.callable(_x())[0].tolist() == [2, 3, 4, 5]  # nobody knows yet
    graph = weakref.ref(world.graph)
    world.graph = None  # type: ignore[assignment]
    with caplog.at_level(logging.INFO, logger="pygraph"):
        for _ in range(5):
            assert partition.callable(_x())[0].tolist() == [1, 2, 3, 4]
    assert entry.state is State.REFUSED and graph() is None
    assert "9 replays after" in entry.reason and "result 0" in entry.reason
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "forward" in record.getMessage() and entry.reason in record.getMessage()
    assert (entry.audits.made, entry.audits.failed, entry.audits.since_good) == (2, 1, 9)
    assert world.engine.without_graph == [0]  # told once, for good
    assert other.graph is not None and other.graph.is_audit_due  # of the same function


def test_while_a_graph_is_suspected_nobody_replays_it(world: World) -> None:
    partition = world.partition(_x, audit=10)
    world.graph.function = lambda args: [args[0] + 2]
    for _ in range(10):
        partition.callable(_x())
    replays = world.graph.replays
    with recording():  # somebody else records
        for _ in range(3):
            assert partition.callable(_x())[0].tolist() == [1, 2, 3, 4]
    assert world.graph.replays == replays


def test_a_suspect_that_cannot_be_replayed_on_the_calls_stream_is_checked_later(world: World) -> None:
    partition = world.partition(_x, audit=10)
    entry = only_entry(partition)
    by_chance = True

    def replayed(args: list[Any]) -> list[Any]:
        return [args[0] + (2 if by_chance else 1)]

    world.graph.function = replayed
    for _ in range(10):
        partition.callable(_x())
    assert entry.audits.suspects
    by_chance = False
    world.graph.error = world.engine.StreamNotReady("replays on other streams are not complete")
    for _ in range(3):
        assert partition.callable(_x())[0].tolist() == [1, 2, 3, 4]
    assert entry.audits.suspects and entry.graph is world.graph
    world.graph.error = None
    assert partition.callable(_x())[0].tolist() == [1, 2, 3, 4]
    assert not entry.audits.suspects and entry.state is State.CAPTURED
    assert entry.audits.failed == 0


def test_results_that_are_left_to_chance_are_no_failure(world: World) -> None:
    """As of a kernel that adds atomically: rounding differs from run to run."""
    noise = iter(range(1, 1 << 20))

    def function(args: list[Any]) -> list[Any]:
        return [args[0] * (1 + 1e-6 * (next(noise) % 7))]

    world.function = world.graph.function = function
    partition = world.partition(_x, audit=5)
    for _ in range(30):
        partition.callable(_x())
    entry = only_entry(partition)
    assert entry.state is State.CAPTURED
    assert entry.audits.made >= 2 and entry.audits.failed == 0


def test_what_a_call_writes_is_written_once(world: World) -> None:
    def function(args: list[Any]) -> list[Any]:
        args[1].add_(1)
        return [args[0] + args[1]]

    world.function = world.graph.function = function
    state = torch.zeros(4)
    partition = world.partition(lambda: [torch.zeros(4), state], frozenset({1}), audit=1)
    for call in range(3, 13):
        (result,) = partition.callable([torch.zeros(4), state])
        assert result.tolist() == state.tolist() == [call] * 4
    assert only_entry(partition).audits.made == 10


def test_a_write_that_a_graph_leaves_out_is_found(world: World) -> None:
    def function(args: list[Any]) -> list[Any]:
        args[0].add_(1)
        return [torch.zeros(1)]

    world.function = function
    world.graph.function = lambda args: [torch.zeros(1)]
    state = torch.zeros(4)
    partition = world.partition(lambda: [state], frozenset({0}), audit=1)
    for _ in range(3):
        partition.callable([state])
    assert state.tolist() == [5] * 4
    assert only_entry(partition).audits.failed == 1


def test_views_of_a_written_input_share_its_clone(world: World) -> None:
    def function(args: list[Any]) -> list[Any]:
        args[0].add_(1)
        return [args[1] * 2]  # a view of it

    world.function = world.graph.function = function
    state = torch.zeros(4)
    partition = world.partition(lambda: [state, state[1:]], frozenset({0}), audit=1)
    for _ in range(3):
        partition.callable([state, state[1:]])
    assert state.tolist() == [5] * 4
    assert only_entry(partition).audits.made == 3


def test_a_suspect_beside_a_view_of_a_written_input_is_checked_again(world: World) -> None:
    """The thorough check has the results in the same order."""

    def function(args: list[Any]) -> list[Any]:
        args[1].add_(1)
        return [args[0][:1] * 2]

    def leaves_out(args: list[Any]) -> list[Any]:
        args[1][:1].add_(1)
        return [args[0][:1] * 2]

    world.function = function
    world.graph.function = leaves_out
    state = torch.zeros(4)
    partition = world.partition(lambda: [state[:1], state], frozenset({1}), audit=1)
    for _ in range(3):
        partition.callable([state[:1], state])
    assert state.tolist() == [5] * 4
    assert only_entry(partition).audits.failed == 1


def test_a_result_that_is_an_argument_is_compared_with_the_calls(world: World) -> None:
    world.function = lambda args: [args[0]]

    def writes(args: list[Any]) -> list[Any]:
        args[0].add_(1)
        return [args[0]]

    partition = world.partition(_x, audit=1)
    only_entry(partition).recording.returned = frozenset({0})
    world.graph.function = writes
    for _ in range(3):
        assert partition.callable(_x())[0].tolist() == [0, 1, 2, 3]
    assert only_entry(partition).audits.failed == 1


def test_memory_that_a_call_gives_away_is_taken_from_clones(world: World) -> None:
    def overwrite(args: list[Any]) -> list[Any]:
        return [args[0].mul_(2)]  # the result lies where the input was

    world.function = world.graph.function = overwrite
    partition = world.partition(_x, audit=1)
    world.graph.donated = [0]
    world.engine.given_away_positions = [0]
    for _ in range(3):
        assert partition.callable(_x())[0].tolist() == [0, 2, 4, 6]
    assert only_entry(partition).audits.made == 3


@pytest.mark.parametrize("source", [-1, 1])
def test_a_generator_is_where_one_call_leaves_it(world: World, source: int) -> None:
    mine = Generator()
    drawn = mine if source == 1 else world.default_generator

    def function(args: list[Any]) -> list[Any]:
        generator = args[1] if source == 1 else world.default_generator
        return [args[0] + generator.draw()]

    def replay(args: list[Any]) -> list[Any]:
        generator = args[1] if source == 1 else world.graph.generator
        return [args[0] + generator.draw()]

    world.function, world.graph.function = function, replay
    world.graph.random_arguments = [source]
    partition = world.partition(lambda: [torch.zeros(1), mine], audit=2)
    for call in range(3, 23):
        (result,) = partition.callable([torch.zeros(1), mine])
        assert result.item() == drawn.offset == 4 * call
    assert only_entry(partition).audits.made == 10


def test_another_threads_random_numbers_end_an_audit_without_a_verdict(world: World) -> None:
    world.graph.random_arguments = [-1]
    world.graph.function = lambda args: [args[0] + world.graph.generator.draw()]

    def function(args: list[Any]) -> list[Any]:
        world.default_generator.draw()  # somebody else's
        return [args[0] + world.default_generator.draw()]

    world.function = function
    partition = world.partition(lambda: [torch.zeros(1)], audit=2)
    for _ in range(10):
        partition.callable([torch.zeros(1)])
    entry = only_entry(partition)
    assert entry.state is State.CAPTURED
    assert entry.audits.made == 0 and entry.audits.skipped > 0


def test_without_room_the_call_is_replayed_and_audited_later(world: World) -> None:
    partition = world.partition(_x)
    world.free_bytes = 1 << 20
    assert _audited_calls(world, partition, 150) == []
    assert only_entry(partition).audits.skipped == 1
    world.free_bytes = 1 << 40
    assert len(_audited_calls(world, partition, 1100)) == 1


def test_an_audit_that_runs_out_of_memory_leaves_nothing_behind(world: World) -> None:
    partition = world.partition(_x, audit=10)
    clones: list[weakref.ref[torch.Tensor]] = []

    def fail(args: list[Any]) -> list[Any]:
        piece = torch.ones(4)
        clones.append(weakref.ref(piece))
        raise torch.OutOfMemoryError("no room")

    def function(args: list[Any]) -> list[Any]:
        assert all(clone() is None for clone in clones)
        assert world.graph.released == len(clones) == len(world.engine.dropped)
        return [args[0] + 1]

    world.function = function
    healthy, world.graph.function = world.graph.function, fail
    world.graph.audit_at = 0
    assert partition.callable(_x())[0].tolist() == [1, 2, 3, 4]
    world.graph.function = healthy
    entry = only_entry(partition)
    assert len(clones) == 1
    assert world.engine.dropped == [0]  # of this device
    assert (entry.state, entry.audits.skipped, entry.audits.made) == (State.CAPTURED, 1, 0)
    assert _audited_calls(world, partition, 30)


def test_what_the_function_raises_is_the_callers(world: World) -> None:
    partition = world.partition(_x, audit=10)
    world.graph.audit_at = 0
    healthy = world.function

    def fail(args: list[Any]) -> list[Any]:
        raise ValueError("the user's")

    world.function = fail
    with pytest.raises(ValueError, match="the user's"):
        partition.callable(_x())
    world.function = healthy
    assert _audited_calls(world, partition, 30)
    assert not runtime.record_lock.locked()


def test_a_profile_shows_replays(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    partition = world.partition(_x, audit=5)
    monkeypatch.setattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    assert _audited_calls(world, partition, 40) == []
    monkeypatch.setattr(torch.autograd.profiler, "_is_profiler_enabled", False)
    assert len(_audited_calls(world, partition, 10)) >= 1


def test_an_audit_beside_a_recording_waits(world: World) -> None:
    partition = world.partition(_x, audit=5)
    with recording():
        assert _audited_calls(world, partition, 40) == []
    assert len(_audited_calls(world, partition, 10)) >= 1


def test_other_threads_replay_while_one_audits(world: World) -> None:
    partition = world.partition(_x, audit=10)
    replayed: list[float] = []
    audited = world.function

    def function(args: list[Any]) -> list[Any]:
        thread = threading.Thread(
            target=lambda: replayed.append(world.calls) or partition.callable(_x())  # type: ignore[func-returns-value]
        )
        thread.start()
        thread.join()
        assert world.calls == replayed[-1]
        return audited(args)

    world.function = function
    assert _audited_calls(world, partition, 25)
    assert replayed


def test_a_reset_during_an_audit(world: World) -> None:
    partition = world.partition(_x, audit=10)

    def function(args: list[Any]) -> list[Any]:
        pygraph.reset()
        return [args[0] + 1]

    world.function = function
    world.graph.audit_at = 0
    assert partition.callable(_x())[0].tolist() == [1, 2, 3, 4]
    assert partition.entries == {} and world.engine.graphs == []
