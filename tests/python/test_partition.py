"""A partition's decisions, with stand-ins for the recording and the graph; no GPU needed."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from pygraph import runtime
from pygraph.gpu import allocator, current
from pygraph.options import Options
from pygraph.partition import observed_effects, pipeline
from pygraph.partition.attempt import Attempt
from pygraph.partition.call import Call
from pygraph.partition.observed_effects import ObservedEffects
from pygraph.partition.partition import Partition
from pygraph.partition.recording_policy import MOST_IN_NEW_THREADS
from pygraph.partition.signature import Entry, Kind, Pending, SelectionState, State
from pygraph.record import recorder, stream_capture
from pygraph.record.recorder import Recording
from pygraph.select import decision_cache
from pygraph.select.trial import REPLAYED, UNCAPTURED, Decision, Timing

from .fake_engine import FakeGraph, StandIns
from .stand_ins import INFO, FakeWatch, call
from .test_recording_policy import after_four_recordings


def _partition(argument_count: int, counts_numbers: bool) -> Partition:
    info = dataclasses.replace(INFO, argument_count=argument_count, counts_numbers=counts_numbers)
    return Partition(lambda args: args, info, Options())


def test_reset_forgets_every_signature() -> None:
    partition = _partition(1, True)
    partition.entries[b"key"] = Entry()
    runtime.engine().wait(partition.callable, b"key", 1.0)
    partition.reset()
    assert partition.entries == {}
    assert runtime.engine().waiting_seconds(partition.callable, b"key") == 0


@pytest.mark.parametrize("selected", [REPLAYED, UNCAPTURED])
def test_a_decision_on_disk_is_known_at_the_first_call(
    monkeypatch: pytest.MonkeyPatch, told_to_the_engine: list[int], selected: str
) -> None:
    """Shapes vary, so that a recording would have to wait."""
    timing = Timing(host=1e-3, device=1e-3, latency=1e-3, noise=0.0, memory=0)
    decision = Decision(selected, {UNCAPTURED: timing, REPLAYED: timing})
    monkeypatch.setattr(decision_cache, "key_of", lambda program, key, device: "name")
    monkeypatch.setattr(decision_cache, "load", lambda name: decision)
    recorded: list[Call] = []

    def attempt(call: Call) -> Attempt:
        recorded.append(call)
        return Attempt(outputs=call.uncaptured(call.args), failure="a test")

    monkeypatch.setattr(pipeline, "attempt", attempt)
    partition = Partition(lambda args: [args[0] + 1], INFO, Options(select="auto"))
    x = torch.ones(2)
    assert torch.equal(partition._miss([x, 3])[0], x + 1)
    (entry,) = partition.entries.values()
    assert recorded == []
    assert entry.state is (State.UNCAPTURED if selected == REPLAYED else State.NOT_SELECTED)
    partition._miss([x, 3])
    assert len(recorded) == (selected == REPLAYED)


def test_a_partition_lives_as_long_as_its_callable() -> None:
    partition = _partition(1, True)
    reference = weakref.ref(partition)
    callable_ = partition.callable
    del partition
    gc.collect()
    assert reference() is not None
    del callable_
    gc.collect()
    assert reference() is None


def test_tuples_of_tensors_are_unpacked_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimpleNamespace(
        graphed_callable=lambda function, miss, device: miss,
        signature=lambda args, device: repr(args).encode(),
        wait=lambda *args: None,
    )
    monkeypatch.setattr(runtime, "engine", lambda: engine)
    monkeypatch.setattr(ObservedEffects, "watched_call", lambda self, args, run: (run(args), ""))

    def function(args: list[object]) -> list[object]:
        result = list(args)
        args.clear()
        return result

    info = dataclasses.replace(INFO, argument_count=4, static=frozenset({2}), mutated=frozenset({0, 3}))
    partition = Partition(function, info, Options())
    for last in (7, 8):
        args: list[object] = [1, (2, 3), 4, last]
        assert partition._miss(args) == [1, (2, 3), 4, last]
        assert args == []
    assert partition._miss([1, [2], 4, 7]) == [1, (2,), 4, 7]
    first, second = partition._unpacked.values()
    assert not partition.entries and len(first.entries) == 2 and len(second.entries) == 1
    assert first.info.argument_count == 5
    assert (first.info.static, first.info.mutated) == (frozenset({3}), frozenset({0, 4}))


@pytest.mark.parametrize("fails_before", [True, False])
def test_a_call_that_cannot_be_watched_is_made_once_and_stays_uncaptured(
    fails_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observed_effects, "Watch", FakeWatch(fails_before))
    calls: list[object] = []

    def function(args: list[object]) -> list[object]:
        calls.append(args[0])
        return list(args)

    monkeypatch.setattr(runtime.engine(), "signature", lambda args, device: b"key")
    entry = call(Partition(function, INFO, Options()), 5)
    assert calls == [5]
    assert entry.state is State.REFUSED
    assert "out of memory" in entry.reason


def test_only_the_first_signatures_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = runtime.engine()
    monkeypatch.setattr(engine, "signature", lambda args, device: repr(args).encode())
    seen: list[object] = []

    def watch(args: list[object], device: int, undo: object) -> FakeWatch:
        seen.append(args[0])
        return FakeWatch(fails_before=False, mutated=frozenset())

    monkeypatch.setattr(observed_effects, "Watch", watch)
    partition = Partition(lambda args: list(args), INFO, Options())
    for number in (3, 4, 5):
        assert partition._miss([number]) == [number]
    assert seen == [3, 4]


@pytest.mark.parametrize("kind", ["inference", "forward", "backward"])
def test_the_allocator_gives_back_what_tuning_and_verification_leave(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But while results are alive, only their pieces would be left, for all that follows."""
    events: list[str] = []
    monkeypatch.setattr(allocator, "_is_due", False)
    monkeypatch.setattr(allocator, "bytes_on_gpu", lambda args: 1 << 30)
    monkeypatch.setattr(allocator, "give_back_all", lambda: events.append("give back"))
    monkeypatch.setattr(observed_effects, "Watch", FakeWatch(False, mutated=frozenset()))
    monkeypatch.setattr(current, "use_device", lambda index, undo: None)

    def function(args: list[object]) -> list[object]:
        events.append("call")
        return list(args)

    def attempt(call: Call) -> Attempt:
        events.append("verify")
        return Attempt(list(call.args), failure="a host callback")

    monkeypatch.setattr(pipeline, "attempt", attempt)
    monkeypatch.setattr(runtime.engine(), "signature", lambda args, device: repr(args).encode())
    info = dataclasses.replace(INFO, kind=kind)
    partition = Partition(function, info, Options(select="always"))
    partition._miss([5])
    assert events == ["give back", "call"]
    partition._miss([5])
    assert events[2:] == ["give back", "verify", *(["give back"] if kind != "inference" else [])]
    events.clear()
    partition._miss([6])  # gives back at its beginning, and is watched
    partition._miss([7])
    assert events == ["give back", "give back", "call", "call"]


@pytest.mark.usefixtures("told_to_the_engine")
def test_calls_that_wait_for_their_recording_are_left_to_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``_call`` stands for a call that the engine asks about, when a wait is over."""
    graph = FakeGraph()
    monkeypatch.setattr(pipeline, "attempt", lambda call: Attempt(list(call.args), graph))
    engine = runtime.engine()
    partition = Partition(lambda args: list(args), INFO, Options(select="always"))
    policy = after_four_recordings(max_graphs=4)  # 0.1 s each
    partition._pipeline = dataclasses.replace(partition._pipeline, policy=policy)

    def waits() -> float:
        return float(engine.waiting_seconds(partition.callable, b"key"))

    entry = call(partition, 7)
    assert waits() == pytest.approx(0.1)
    assert not partition.is_waiting(b"key", entry)  # called once
    engine.wait(partition.callable, b"key", 0.05)  # as the engine counts
    assert partition.is_waiting(b"key", entry)
    engine.clear_waiting(partition.callable)
    policy.note_dropped(4)  # 0.2 s from now on
    assert call(partition, 7).state is State.UNCAPTURED
    assert waits() == pytest.approx(0.1)
    engine.clear_waiting(partition.callable)
    assert call(partition, 7).state is State.CAPTURED
    assert not partition.is_waiting(b"key", entry)
    partition.reset()
    call(partition, None)
    assert waits() == 0  # the first signatures of static shapes are recorded at once


@pytest.mark.parametrize("select", ["always", "never"])
def test_the_second_call_is_recorded_unless_graphs_are_off(
    told_to_the_engine: list[int], monkeypatch: pytest.MonkeyPatch, select: str
) -> None:
    graph = FakeGraph()
    attempts = []

    def attempt(call: Call) -> Attempt:
        attempts.append(call.args)
        return Attempt(list(call.args), graph)

    monkeypatch.setattr(pipeline, "attempt", attempt)
    partition = Partition(lambda args: list(args), INFO, Options(select=select))
    assert call(partition, None).state is State.UNCAPTURED
    entry = call(partition, None)
    if select == "always":
        assert (entry.state, entry.graph, len(attempts)) == (State.CAPTURED, graph, 1)
    else:
        assert (entry.state, entry.graph, attempts) == (State.NOT_SELECTED, None, [])
        assert told_to_the_engine == [0]  # the engine is told, once and for all
        call(partition, None)
        assert told_to_the_engine == [0]


def test_a_refused_signature_is_told_to_the_engine_once(
    told_to_the_engine: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def attempt(call: Call) -> Attempt:
        return Attempt(list(call.args), failure="a host callback")

    monkeypatch.setattr(pipeline, "attempt", attempt)
    partition = Partition(lambda args: list(args), INFO, Options(select="always"))
    for _ in range(5):
        entry = call(partition, None)
    assert (entry.state, entry.reason) == (State.REFUSED, "a host callback")
    assert told_to_the_engine == [0]


def test_a_recording_that_ran_out_of_memory_is_tried_again_later_and_not_for_ever(
    told_to_the_engine: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``_call`` stands for a call that the engine asks about, when a recheck is due."""
    graph = FakeGraph()
    attempts: list[int] = []

    def attempt(call: Call) -> Attempt:
        attempts.append(1)
        if len(attempts) in (3,):
            return Attempt(list(call.args), graph)
        return Attempt(list(call.args), failure=recorder.describe_failure(torch.OutOfMemoryError("no")))

    monkeypatch.setattr(pipeline, "attempt", attempt)
    dropped: list[int] = []
    monkeypatch.setattr(allocator, "drop_blocks", dropped.append)
    partition = Partition(lambda args: list(args), INFO, Options(select="always"))
    other = partition.entries[b"another"] = Entry(State.REFUSED, selection=SelectionState(rechecks=1))

    def refused_then_forgotten() -> None:
        for _ in range(3):  # seen, recorded, told to the engine
            assert partition._miss([None]) == [None]
        assert partition.entries[b"key"].state is State.REFUSED
        assert partition._miss([None]) == [None]

    refused_then_forgotten()
    assert dropped == [INFO.device]  # the next one may find room
    assert b"key" not in partition.entries
    assert other.selection.rechecks == 0  # the engine forgot this one too, and will be told of it again
    refused_then_forgotten()
    assert told_to_the_engine == [1000, 4000]
    for _ in range(2):
        assert partition._miss([None]) == [None]
    assert partition.entries[b"key"].state is State.CAPTURED
    del partition.entries[b"key"]
    refused_then_forgotten()
    refused_then_forgotten()
    assert told_to_the_engine == [1000, 4000, 16000, 0]
    assert partition.entries[b"key"].state is State.REFUSED  # for good


def test_a_suspect_result_is_checked_by_the_next_call(
    told_to_the_engine: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    graph = FakeGraph()
    pending = Pending(Recording(graph, StandIns(), []), [3], 0)

    def attempt(call: Call) -> Attempt:
        seen.append(call.pending)
        return (
            Attempt(list(call.args), pending=pending)
            if len(seen) == 1
            else Attempt(list(call.args), graph)
        )

    monkeypatch.setattr(pipeline, "attempt", attempt)
    partition = Partition(lambda args: list(args), INFO, Options(select="always"))
    for _ in range(3):
        entry = call(partition, None)
    assert seen == [None, pending]
    assert (entry.state, entry.recording.pending) == (State.CAPTURED, None)


def test_suspects_that_a_call_cannot_check_are_checked_by_a_later_one(
    told_to_the_engine: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = FakeGraph()
    pending = Pending(Recording(graph, StandIns(), []), [3], 0)
    attempts = [{"pending": pending}, {"failure": "not on this stream", "is_transient": True}, {}]
    seen = []

    def attempt(call: Call) -> Attempt:
        seen.append(call.pending)
        found = attempts[len(seen) - 1] or {"graph": graph}
        return Attempt(list(call.args), **found)  # type: ignore[arg-type]

    monkeypatch.setattr(pipeline, "attempt", attempt)
    partition = Partition(lambda args: list(args), INFO, Options(select="always"))
    for _ in range(4):
        entry = call(partition, None)
    assert seen == [None, pending, pending]
    assert (entry.state, entry.recording.pending) == (State.CAPTURED, None)


def _raising(world: pytest.MonkeyPatch, **kwargs: bool) -> list[int]:
    """Recordings raise; the threads that they are made in."""
    threads: list[int] = []

    def attempt(call: Call) -> Attempt:
        threads.append(threading.get_ident())
        return Attempt(call.uncaptured(call.args), failure="no handle", **kwargs)

    world.setattr(pipeline, "attempt", attempt)
    world.setattr(stream_capture, "make_handles", lambda: None)
    return threads


def _in_thread(partition: Partition, entry: Entry) -> None:
    thread = threading.Thread(target=lambda: partition._pipeline.record_call(b"key", entry, [0]))
    thread.start()
    thread.join()


def test_a_capture_that_raises_in_a_new_thread_is_left_to_one_that_has_run_the_function(
    told_to_the_engine: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = _raising(monkeypatch, raised=True)
    partition, entry = Partition(lambda args: args, INFO, Options()), Entry()
    partition.entries[b"key"] = entry
    for _ in range(10):
        _in_thread(partition, entry)
    assert len(threads) == MOST_IN_NEW_THREADS
    assert entry.state is State.UNCAPTURED
    partition.uncaptured([0])
    partition._pipeline.record_call(b"key", entry, [0])  # here it is known, and a failure is one
    assert entry.state is State.REFUSED and len(threads) == MOST_IN_NEW_THREADS + 1


def test_a_failure_of_the_call_alone_refuses_nothing(
    told_to_the_engine: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = _raising(monkeypatch, raised=True, is_transient=True)
    partition, entry = Partition(lambda args: args, INFO, Options()), Entry()
    partition.entries[b"key"] = entry
    partition.uncaptured([0])
    for _ in range(4):
        partition._pipeline.record_call(b"key", entry, [0])
    assert len(threads) == 4  # the next call may be another
    for _ in range(1000):
        partition._pipeline.record_call(b"key", entry, [0])
    assert 5 <= len(threads) <= 10 and entry.state is State.UNCAPTURED
    assert entry.recording.retries.in_new_threads == 0
