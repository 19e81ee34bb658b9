"""A partition's decisions, with stand-ins for the recording and the graph; no GPU needed."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from pygraph import partition as partition_module
from pygraph import recorder, runtime, verify
from pygraph.capture import Attempt, SideEffects, attempt
from pygraph.entry import Entry, PartitionInfo, Pending, State
from pygraph.options import Options
from pygraph.partition import Partition
from pygraph.recorder import Recording
from pygraph.recording_policy import RecordingPolicy

_INFO = PartitionInfo(
    name="forward",
    device=0,
    argument_count=1,
    counts_numbers=True,
    static=frozenset({0}),
    mutated=frozenset({1}),
    is_backward=False,
    saved=(),
    on_host=frozenset(),
)


def _partition(argument_count: int, counts_numbers: bool) -> Partition:
    info = dataclasses.replace(_INFO, argument_count=argument_count, counts_numbers=counts_numbers)
    return Partition(lambda args: args, info, Options())


@pytest.mark.parametrize(
    ("argument_count", "counts_numbers", "fits"),
    [(2, False, True), (3, True, True), (3, False, False), (2, True, False)],
)
def test_hints_are_dropped_where_they_do_not_fit(
    argument_count: int, counts_numbers: bool, fits: bool
) -> None:
    args = [torch.zeros(1), torch.zeros(1), 7]
    assert _partition(argument_count, counts_numbers)._hints_fit(args) is fits


def test_reset_forgets_every_signature() -> None:
    partition = _partition(1, True)
    partition.entries[b"key"] = object()  # type: ignore[assignment]
    partition.reset()
    assert partition.entries == {}


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


class _Graph:
    """Stands in for a captured graph that adds one, or that cannot be launched."""

    output_bytes = 0
    donated: tuple[int, ...] = ()
    nodes = 3
    relocations = 4

    def __init__(self, launches: bool = True, unexplained_words: int = 0) -> None:
        self.unexplained_words = unexplained_words
        self._launches = launches

    def release_workspace(self) -> None:
        pass

    def replay(
        self, args: list[torch.Tensor], gives_away: bool, poison: int = -1
    ) -> list[torch.Tensor]:
        if not self._launches:
            raise runtime.engine().DriverError("graph_launch failed")
        return [args[0] + 1]


def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification on CPU tensors."""
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(verify, "_foreign_bytes", lambda: 0)
    monkeypatch.setattr(verify.Run, "_results", lambda self, outputs, args: list(outputs))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)


def _attempt(
    monkeypatch: pytest.MonkeyPatch, graph: _Graph | Exception, verify_graphs: bool
) -> Attempt:
    """One second call with a recording that yields ``graph``; the result must be right in any case."""

    def record(*args: object, **kwargs: object) -> Recording:
        if isinstance(graph, Exception):
            raise graph
        pair = SimpleNamespace(poison=lambda: None, untouched=lambda: True)
        return Recording(graph, pair, [])

    _without_gpu(monkeypatch)
    monkeypatch.setattr(recorder, "record", record)
    x = torch.ones(4)

    def add_one(args: list[torch.Tensor]) -> list[torch.Tensor]:
        return [args[0] + 1]

    options = Options(verify=verify_graphs)
    result = attempt(add_one, add_one, [x], _INFO, options, SideEffects(), None)
    assert torch.equal(result.outputs[0], x + 1)
    return result


@pytest.mark.parametrize("verify_graphs", [True, False])
def test_a_good_recording_is_captured(monkeypatch: pytest.MonkeyPatch, verify_graphs: bool) -> None:
    graph = _Graph()
    assert _attempt(monkeypatch, graph, verify_graphs).graph is graph


@pytest.mark.parametrize("verify_graphs", [True, False])
@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (torch.OutOfMemoryError("no"), "recording ran out of memory"),
        (RuntimeError("sync while capturing\nmore"), "RuntimeError: sync while capturing"),
        (_Graph(launches=False), "graph_launch failed"),
    ],
)
def test_a_failure_leaves_the_call_uncaptured_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, graph: _Graph | Exception, reason: str, verify_graphs: bool
) -> None:
    result = _attempt(monkeypatch, graph, verify_graphs)
    assert result.graph is None
    assert reason in result.failure


def test_unexplained_words_are_refused_without_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _Graph(unexplained_words=1)
    assert _attempt(monkeypatch, graph, verify_graphs=False).graph is None
    assert _attempt(monkeypatch, graph, verify_graphs=True).graph is graph


def _after_four_recordings(max_graphs: int = 256) -> RecordingPolicy:
    policy = RecordingPolicy(max_graphs)
    for _ in range(4):
        policy.note_recording(0.1)
    return policy


def test_static_shapes_are_recorded_at_once_and_varying_ones_when_it_pays() -> None:
    fresh = RecordingPolicy(256)
    assert fresh.seconds_to_wait(has_numbers=False) == 0
    assert fresh.seconds_to_wait(has_numbers=True) == pytest.approx(0.01)  # assumed
    assert _after_four_recordings().seconds_to_wait(has_numbers=False) == pytest.approx(0.1)
    assert _after_four_recordings().seconds_to_wait(has_numbers=True) == pytest.approx(0.1)


def test_shapes_that_push_each_other_out_are_recorded_ever_less() -> None:
    policy = _after_four_recordings(max_graphs=4)
    prices = []
    for dropped in (0, 3, 1, 4, 8):  # 0, 3, 4, 8 and 16 in all
        policy.note_dropped(dropped)
        prices.append(policy.seconds_to_wait(has_numbers=False))
    assert prices == pytest.approx([0.1, 0.1, 0.2, 0.4, 1.6])


@pytest.fixture
def calls_per_look(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A Partition without a GPU; what it asks of the engine."""
    looks: list[int] = []
    real = runtime.engine()
    engine = SimpleNamespace(
        graphed_callable=real.graphed_callable,
        clear_decided=real.clear_decided,
        signature=lambda args, device: b"key",
        wait=real.wait,
        waiting_seconds=real.waiting_seconds,
        clear_waiting=real.clear_waiting,
        free_blas_workspaces=lambda: None,
        add_without_graph=lambda callable, args, calls: looks.append(calls),
        clear_without_graph=real.clear_without_graph,
        add_graph=lambda callable, graph, most, calls: [],
    )
    monkeypatch.setattr(runtime, "engine", lambda: engine)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(Partition, "_watched_call", lambda self, entry, args: self.uncaptured(args))
    return looks


def test_tuples_of_tensors_are_unpacked_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimpleNamespace(
        graphed_callable=lambda function, miss, device: miss,
        signature=lambda args, device: repr(args).encode(),
        wait=lambda *args: None,
    )
    monkeypatch.setattr(runtime, "engine", lambda: engine)
    monkeypatch.setattr(Partition, "_watched_call", lambda self, entry, args: self.uncaptured(args))

    def function(args: list[object]) -> list[object]:
        result = list(args)
        args.clear()
        return result

    info = dataclasses.replace(
        _INFO, argument_count=4, static=frozenset({2}), mutated=frozenset({0, 3})
    )
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


class _Watch:
    """A watch that fails, before the call or after it."""

    def __init__(self, fails_before: bool) -> None:
        self._fails_before = fails_before

    def __call__(self, args: list[object], device: int) -> _Watch:
        if self._fails_before:
            raise torch.OutOfMemoryError("no room for a fingerprint")
        return self

    def mutated(self) -> frozenset[int]:
        raise torch.OutOfMemoryError("no room for a fingerprint")


@pytest.mark.parametrize("fails_before", [True, False])
def test_a_call_that_cannot_be_watched_is_made_once_and_stays_uncaptured(
    fails_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_module, "Watch", _Watch(fails_before))
    calls: list[object] = []

    def function(args: list[object]) -> list[object]:
        calls.append(args[0])
        return list(args)

    partition = Partition(function, _INFO, Options())
    entry = Entry()
    assert partition._watched_call(entry, [5]) == [5]
    assert calls == [5]
    assert entry.state is State.REFUSED
    assert "out of memory" in entry.reason


def _call(partition: Partition, number: object) -> Entry:
    assert partition._miss([number]) == [number]
    (entry,) = partition.entries.values()
    return entry


@pytest.mark.usefixtures("calls_per_look")
def test_calls_that_wait_for_their_recording_are_left_to_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``_call`` stands for a call that the engine asks about, when a wait is over."""
    graph = _Graph()
    monkeypatch.setattr(
        partition_module.capture, "attempt", lambda f, u, args, *rest: Attempt(list(args), graph)
    )
    engine = runtime.engine()
    partition = Partition(lambda args: list(args), _INFO, Options(select="always"))
    partition._policy = _after_four_recordings(max_graphs=4)  # 0.1 s each

    def waits() -> float:
        return float(engine.waiting_seconds(partition.callable, b"key"))

    entry = _call(partition, 7)
    assert waits() == pytest.approx(0.1)
    assert not partition.is_waiting(b"key", entry)  # called once
    engine.wait(partition.callable, b"key", 0.05)  # as the engine counts
    assert partition.is_waiting(b"key", entry)
    engine.clear_waiting(partition.callable)
    partition._policy.note_dropped(4)  # 0.2 s from now on
    assert _call(partition, 7).state is State.UNCAPTURED
    assert waits() == pytest.approx(0.1)
    engine.clear_waiting(partition.callable)
    assert _call(partition, 7).state is State.CAPTURED
    assert not partition.is_waiting(b"key", entry)
    partition.reset()
    _call(partition, None)
    assert waits() == 0  # the first signatures of static shapes are recorded at once


@pytest.mark.parametrize("select", ["always", "never"])
def test_the_second_call_is_recorded_unless_graphs_are_off(
    calls_per_look: list[int], monkeypatch: pytest.MonkeyPatch, select: str
) -> None:
    graph = _Graph()
    attempts = []

    def attempt(function: object, uncaptured: object, args: list[int], *rest: object) -> Attempt:
        attempts.append(args)
        return Attempt(list(args), graph)

    monkeypatch.setattr(partition_module.capture, "attempt", attempt)
    partition = Partition(lambda args: list(args), _INFO, Options(select=select))
    assert _call(partition, None).state is State.UNCAPTURED
    entry = _call(partition, None)
    if select == "always":
        assert (entry.state, entry.graph, len(attempts)) == (State.CAPTURED, graph, 1)
    else:
        assert (entry.state, entry.graph, attempts) == (State.NOT_SELECTED, None, [])
        assert calls_per_look == [0]  # the engine is told, once and for all
        _call(partition, None)
        assert calls_per_look == [0]


def test_a_refused_signature_is_told_to_the_engine_once(
    calls_per_look: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def attempt(function: object, uncaptured: object, args: list[int], *rest: object) -> Attempt:
        return Attempt(list(args), failure="a host callback")

    monkeypatch.setattr(partition_module.capture, "attempt", attempt)
    partition = Partition(lambda args: list(args), _INFO, Options(select="always"))
    for _ in range(5):
        entry = _call(partition, None)
    assert (entry.state, entry.reason) == (State.REFUSED, "a host callback")
    assert calls_per_look == [0]


def test_a_recording_that_ran_out_of_memory_is_tried_again_later_and_not_for_ever(
    calls_per_look: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``_call`` stands for a call that the engine asks about, when a look is due."""
    graph = _Graph()
    attempts: list[int] = []

    def attempt(function: object, uncaptured: object, args: list[int], *rest: object) -> Attempt:
        attempts.append(1)
        if len(attempts) in (3,):
            return Attempt(list(args), graph)
        return Attempt(list(args), failure=recorder.describe_failure(torch.OutOfMemoryError("no")))

    monkeypatch.setattr(partition_module.capture, "attempt", attempt)
    partition = Partition(lambda args: list(args), _INFO, Options(select="always"))
    other = partition.entries[b"another"] = Entry(State.REFUSED, looks=1)

    def refused_then_forgotten() -> None:
        for _ in range(3):  # seen, recorded, told to the engine
            assert partition._miss([None]) == [None]
        assert partition.entries[b"key"].state is State.REFUSED
        assert partition._miss([None]) == [None]

    refused_then_forgotten()
    assert b"key" not in partition.entries
    assert other.looks == 0  # the engine forgot this one too, and will be told of it again
    refused_then_forgotten()
    assert calls_per_look == [1000, 4000]
    for _ in range(2):
        assert partition._miss([None]) == [None]
    assert partition.entries[b"key"].state is State.CAPTURED
    del partition.entries[b"key"]
    refused_then_forgotten()
    refused_then_forgotten()
    assert calls_per_look == [1000, 4000, 16000, 0]
    assert partition.entries[b"key"].state is State.REFUSED  # for good


def test_a_suspect_result_is_looked_at_by_the_next_call(
    calls_per_look: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    graph = _Graph()
    pending = Pending(Recording(graph, None, []), [3], 0)

    def attempt(function: object, uncaptured: object, args: list[int], *rest: object) -> Attempt:
        seen.append(rest[-1])
        return Attempt(list(args), pending=pending) if len(seen) == 1 else Attempt(list(args), graph)

    monkeypatch.setattr(partition_module.capture, "attempt", attempt)
    partition = Partition(lambda args: list(args), _INFO, Options(select="always"))
    for _ in range(3):
        entry = _call(partition, None)
    assert seen == [None, pending]
    assert (entry.state, entry.pending) == (State.CAPTURED, None)


def test_the_graph_that_is_used_is_the_one_whose_other_results_were_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second recording would be another graph, of which only the suspects were looked at."""

    class Flipping(_Graph):
        """Differs in its second result at the first replay, as sums by atomic additions may."""

        replays = 0

        def replay(
            self, args: list[torch.Tensor], gives_away: bool, poison: int = -1
        ) -> list[torch.Tensor]:
            self.replays += 1
            return [args[0] + 1, args[0] + (2 + 2**-20 if self.replays == 1 else 2)]

    def function(args: list[torch.Tensor]) -> list[torch.Tensor]:
        return [args[0] + 1, args[0] + 2]

    graphs: list[Flipping] = []

    def record(*args: object, **kwargs: object) -> Recording:
        graphs.append(Flipping())
        pair = SimpleNamespace(poison=lambda: None, untouched=lambda: True)
        return Recording(graphs[-1], pair, [])

    _without_gpu(monkeypatch)
    monkeypatch.setattr(recorder, "record", record)
    x = torch.ones(4)
    common = (_INFO, Options(), SideEffects())
    first = attempt(function, function, [x], *common, None)
    assert first.graph is None
    assert first.pending is not None
    assert list(first.pending.suspects) == [1]
    second = attempt(function, function, [x], *common, first.pending)
    assert len(graphs) == 1
    assert second.graph is graphs[0]
