"""Which check of a graph comes first: audits, trials, rechecks; and what drops it in between."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pygraph import runtime
from pygraph.options import Options
from pygraph.partition import pipeline, timed_calls
from pygraph.partition.attempt import Attempt, verify_and_call
from pygraph.partition.call import Call, SideEffects
from pygraph.partition.partition import Partition
from pygraph.partition.signature import Pending, State
from pygraph.record.recorder import Recording
from pygraph.select import decision_cache
from pygraph.select.trial import REPLAYED, UNCAPTURED, Decision, Sample, Timing
from pygraph.verify.rehearsal import Rehearsal

from . import audit_world
from .audit_world import Graph, World, only_entry
from .contexts import recording
from .fake_engine import StandIns

_REPLAYS_WITHOUT_END = 5000


class _Many(audit_world.Engine):
    """A graph for each number of elements."""

    def __init__(self, real: Any) -> None:
        super().__init__(real)
        self.by_size: dict[int, Graph] = {}

    def graphed_callable(self, uncaptured: Any, miss: Any, device: int) -> Any:
        def call(args: list[Any]) -> Sequence[Any]:
            graph = self.by_size.get(args[0].numel())
            if graph not in self.graphs or graph.is_audit_due:
                return miss(args)  # type: ignore[no-any-return]
            self.remove_graph(None, graph)
            self.graphs.insert(0, graph)
            outputs = graph.replay(args, True)
            args.clear()
            return outputs

        return call

    def add_graph(self, callable: Any, graph: Graph, most: int, calls: int) -> list[Graph]:
        super().add_graph(callable, graph, most, calls)
        dropped, self.graphs = self.graphs[most:], self.graphs[:most]
        return dropped

    def signature(self, args: list[Any], device: int) -> bytes:
        return str(args[0].numel()).encode()


@pytest.fixture(autouse=True)
def _without_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls take a millisecond; nothing is on disk."""
    runtime.partitions.clear()
    monkeypatch.setattr(decision_cache, "load", lambda key: None)
    monkeypatch.setattr(decision_cache, "save", lambda key, decision: None)
    monkeypatch.setattr(decision_cache, "key_of", lambda *parts: "key")

    def timed(run: Any, sleep: float) -> Any:
        result = run()
        return result, Sample(1e-3, device=1e-3) if sleep > 0 else Sample(1e-3, latency=1e-3)

    monkeypatch.setattr(timed_calls, "timed", timed)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch, lambda args: [args[0] + 1])


def _wrong(args: list[Any]) -> list[Any]:
    return [args[0] + 2]


def _for_many_sizes(
    world: World, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[Partition, dict[int, Graph]]:
    """A partition, and its graphs by size."""
    world.engine = engine = _Many(runtime.engine())

    def uncaptured(args: list[Any]) -> list[Any]:
        outputs = world.function(args)
        args.clear()
        return outputs

    def attempt(call: Call) -> Attempt:
        graph = engine.by_size[call.args[0].numel()] = Graph(world.function)
        return Attempt(call.uncaptured(call.args), graph)

    monkeypatch.setattr(pipeline, "attempt", attempt)
    partition = Partition(uncaptured, audit_world.INFO, Options(**options))
    partition._effects.known = SideEffects()
    return partition, engine.by_size


def _inputs(size: int = 4) -> list[Any]:
    return [torch.zeros(size)]


def _wrong_results(partition: Partition, calls: int, size: int = 4) -> int:
    return sum(partition.callable(_inputs(size))[0].tolist() != [1] * size for _ in range(calls))


def test_where_each_call_is_audited_none_is_replayed_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition, graphs = _for_many_sizes(world, monkeypatch, audit=1, select="auto")
    for _ in range(2):
        partition.callable(_inputs())
    assert only_entry(partition).state is State.CAPTURED  # without a trial
    graphs[4].function = _wrong
    assert _wrong_results(partition, 40) == 0
    assert only_entry(partition).state is State.REFUSED


def test_after_a_drop_a_graph_on_trial_is_audited_at_its_next_call(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition, graphs = _for_many_sizes(world, monkeypatch, audit=10, select="auto")
    for _ in range(2):
        partition.callable(_inputs(4))
    known = partition.entries[b"4"]
    known.use(graphs[4])  # as after its trial
    known.selection.trial = None
    partition.install(graphs[4], 0)
    for _ in range(2):
        partition.callable(_inputs(5))
    assert partition.entries[b"5"].state is State.MEASURING
    for graph in graphs.values():
        graph.function = _wrong
    graphs[4].audit_at = 0
    for _ in range(2):  # the audit, and the thorough check
        partition.callable(_inputs(4))
    assert known.state is State.REFUSED
    with recording():  # by another thread: it is still due afterwards
        assert _wrong_results(partition, 3, size=5) == 0
    assert _wrong_results(partition, 30, size=5) == 0
    assert partition.entries[b"5"].state is State.REFUSED


@pytest.mark.parametrize("is_profiled", [False, True])
def test_the_first_calls_are_compared_before_others_are_replayed(
    world: World, monkeypatch: pytest.MonkeyPatch, is_profiled: bool
) -> None:
    """Also if another thread records, or a profiler is active, at the time."""
    info = dataclasses.replace(audit_world.INFO, compared_calls=2)
    monkeypatch.setattr(audit_world, "INFO", info)
    partition = world.partition(_inputs)
    world.graph.function = _wrong
    with monkeypatch.context() as meanwhile:
        if is_profiled:
            meanwhile.setattr(torch.autograd.profiler, "_is_profiler_enabled", True)
            assert _wrong_results(partition, 3) == 0
        else:
            with recording():
                assert _wrong_results(partition, 3) == 0
    assert _wrong_results(partition, 3) == 0
    assert only_entry(partition).state is State.REFUSED


@pytest.mark.parametrize("is_profiled", [False, True])
def test_after_a_drop_a_graph_in_use_is_audited_before_others_are_replayed(
    world: World, monkeypatch: pytest.MonkeyPatch, is_profiled: bool
) -> None:
    partition, graphs = _for_many_sizes(world, monkeypatch, audit=1000, select="always")
    for size in (4, 5):
        for _ in range(3):
            partition.callable(_inputs(size))
    for graph in graphs.values():
        graph.function = _wrong
    graphs[4].audit_at = 0
    for _ in range(2):
        partition.callable(_inputs(4))
    assert partition.entries[b"4"].state is State.REFUSED
    with monkeypatch.context() as meanwhile, contextlib.ExitStack() as stack:
        if is_profiled:
            meanwhile.setattr(torch.autograd.profiler, "_is_profiler_enabled", True)
        else:
            stack.enter_context(recording())
        assert _wrong_results(partition, 3, size=5) == 0
    assert _wrong_results(partition, 3, size=5) == 0


@pytest.mark.parametrize("is_recheck", [False, True])
def test_a_drop_right_before_a_timed_replay(
    world: World, monkeypatch: pytest.MonkeyPatch, is_recheck: bool
) -> None:
    """Another thread's, before this one has the lock."""
    timing = Timing(1e-3, 1e-3, 1e-3, 0, 0)
    if is_recheck:
        decision = Decision(REPLAYED, {REPLAYED: timing, UNCAPTURED: timing})
        monkeypatch.setattr(decision_cache, "load", lambda key: decision)
    partition, graphs = _for_many_sizes(world, monkeypatch, audit=10**6, select="auto")
    for size in (4, 5):
        for _ in range(2):
            partition.callable(_inputs(size))
    known, entry = partition.entries[b"4"], partition.entries[b"5"]
    if not is_recheck:
        partition.callable(_inputs(5))  # the next one is a replay
        known.use(graphs[4])
        known.selection.trial = None
        partition.install(graphs[4], 0)
    for graph in graphs.values():
        graph.function = _wrong
    graphs[4].audit_at = 0
    take, is_first = runtime.record_lock.take, True

    def take_late(undo: Any) -> bool:
        nonlocal is_first
        if is_first:
            is_first = False
            for _ in range(2):
                partition.callable(_inputs(4))
            assert known.state is State.REFUSED
        return bool(take(undo))

    monkeypatch.setattr(runtime.record_lock, "take", take_late)
    assert partition._call_as_due(b"5", entry, _inputs(5))[0].tolist() == [1] * 5


def test_while_a_first_call_is_compared_no_other_thread_replays(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = dataclasses.replace(audit_world.INFO, compared_calls=2)
    monkeypatch.setattr(audit_world, "INFO", info)
    partition = world.partition(_inputs)
    world.graph.function = _wrong
    found: list[int] = []

    def function(args: list[Any]) -> list[Any]:
        if threading.current_thread() is threading.main_thread() and not found:
            other = threading.Thread(target=lambda: found.append(_wrong_results(partition, 5)))
            other.start()
            other.join()
        return [args[0] + 1]

    world.function = function
    assert _wrong_results(partition, 1) == 0
    assert found == [0]


def test_a_busy_call_is_not_replayed_where_each_is_audited(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition, graphs = _for_many_sizes(world, monkeypatch, audit=1, select="always")
    for _ in range(4):
        partition.callable(_inputs())
    graphs[4].function = _wrong
    with recording():
        assert _wrong_results(partition, 1) == 0
    assert _wrong_results(partition, 20) == 0


def test_calls_that_could_not_be_compared_count_for_one_suspicion(world: World) -> None:
    partition = world.partition(_inputs, audit=10)
    entry = only_entry(partition)
    for _ in range(10):
        world.graph.function = _wrong  # left to chance
        world.graph.audit_at = 0
        partition.callable(_inputs())
        world.graph.function = world.function
        entry.audits.visible = [7]  # as if the call had other written inputs
        partition.callable(_inputs())
        entry.audits.visible = []
        partition.callable(_inputs())
        assert only_entry(partition) is entry
        assert not entry.audits.suspects


def test_a_recording_that_waits_for_another_call_is_given_up_if_none_comes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has donated memory, and all further calls are on a stream that the program may destroy."""
    partition = world.partition(_inputs)
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
    assert _wrong_results(partition, 50) == 0
    assert entry.state is State.CAPTURED


def test_a_suspected_graph_whose_calls_have_other_results_is_recorded_anew(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The recording of another signature has shown that the function writes a further input."""
    state = torch.zeros(3)
    partition = world.partition(lambda: [torch.zeros(4), state], audit=10)
    entry = only_entry(partition)
    world.graph.function = _wrong
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
    partition, graphs = _for_many_sizes(world, monkeypatch, **options)
    for _ in range(3):
        partition.callable(_inputs(4))
    graphs[4].function = _wrong
    graphs[4].audit_at = 0
    partition.callable(_inputs(4))
    assert partition.entries[b"4"].audits.suspects
    for _ in range(3):
        partition.callable(_inputs(5))
    assert b"4" not in partition.entries
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "an audit found result 0 to differ" in warning


def test_graphs_whose_trial_does_not_end_make_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition, _ = _for_many_sizes(world, monkeypatch, select="auto", max_graphs=4)
    for _ in range(4):
        for size in range(1, 65):
            partition.callable(_inputs(size))
    assert sum(entry.graph is not None for entry in partition.entries.values()) == 8


@pytest.mark.parametrize("name", ["NotGivenAway", "StreamNotReady"])
def test_a_trial_without_a_replay_ends(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each of its calls would wait for the stream."""
    partition, graphs = _for_many_sizes(world, monkeypatch, select="auto")
    for _ in range(2):
        partition.callable(_inputs())
    error = getattr(world.engine, name)("not in this call")
    tries = 0

    def replay(*parts: Any) -> None:
        nonlocal tries
        tries += 1
        raise error

    monkeypatch.setattr(graphs[4], "replay", replay)
    entry = only_entry(partition)
    while entry.state is State.MEASURING and tries < 100:
        assert _wrong_results(partition, 1) == 0
    assert (entry.state, tries, entry.calls_until_retry) == (State.REFUSED, 50, 1000)
    assert "one after the other: not in this call" in entry.reason


def test_a_recheck_waits_for_a_call_that_fits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    partition = world.partition(_inputs, audit=0)
    selection = only_entry(partition).selection
    world.graph.donated = [0]
    fits = True
    monkeypatch.setattr(world.graph, "gives_away", lambda args: fits, raising=False)
    partition.install(world.graph, 10)  # type: ignore[arg-type]
    for _ in range(10):
        partition.callable(_inputs())
    fits = False
    partition.callable(_inputs())
    assert selection.rechecks == 0
    fits = True
    partition.callable(_inputs())
    assert selection.rechecks == 1


def test_a_suspect_in_a_call_that_gives_nothing_away_is_checked_in_a_later_one(world: World) -> None:
    partition = world.partition(_inputs, audit=10)
    entry = only_entry(partition)
    world.graph.function = _wrong  # once: results left to chance
    world.graph.audit_at = 0
    partition.callable(_inputs())
    assert entry.audits.suspects
    world.graph.function = world.function
    world.graph.error = world.engine.NotGivenAway("somebody holds an argument")
    partition.callable(_inputs())
    world.graph.error = None
    assert (entry.state, bool(entry.audits.suspects)) == (State.CAPTURED, True)
    partition.callable(_inputs())
    assert (entry.state, entry.audits.failed, entry.audits.suspects) == (State.CAPTURED, 0, ())


def test_memory_that_is_short_after_the_call_does_not_reach_the_program(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result on the CPU, or one whose readers conjugate it, is copied to be compared."""
    partition = world.partition(_inputs, audit=10)
    world.graph.function = _wrong
    world.graph.audit_at = 0
    partition.callable(_inputs())
    assert only_entry(partition).audits.suspects

    def results_of_call(self: Rehearsal, outputs: Sequence[Any]) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Rehearsal, "results_of_call", results_of_call)
    assert _wrong_results(partition, 1) == 0
