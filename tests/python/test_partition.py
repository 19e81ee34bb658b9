"""A partition's decisions, with stand-ins for the recording and the graph; no GPU needed."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from pygraph import recorder, runtime, verify
from pygraph.entry import Entry, PartitionInfo, State
from pygraph.options import Options
from pygraph.partition import Function, Partition
from pygraph.recorder import Recording


def _partition(
    argument_count: int,
    counts_numbers: bool,
    options: Options = Options(),  # noqa: B008
    function: Function = lambda args: args,
) -> Partition:
    info = PartitionInfo(
        name="forward",
        device=0,
        argument_count=argument_count,
        counts_numbers=counts_numbers,
        static=frozenset({0}),
        mutated=frozenset({1}),
        is_backward=False,
        saved=(),
        on_host=frozenset(),
    )
    return Partition(function, info, options)


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

    def poison_workspace(self, stream: int) -> None:
        pass

    def release_workspace(self) -> None:
        pass

    def replay(
        self, args: list[torch.Tensor], gives_away: bool, poison: int = -1
    ) -> list[torch.Tensor]:
        if not self._launches:
            raise runtime.engine().DriverError("graph_launch failed")
        return [args[0] + 1]


def _record_and_verify(
    monkeypatch: pytest.MonkeyPatch, graph: _Graph | Exception, verify_graphs: bool
) -> Entry:
    """One second call with a recording that yields ``graph``; the result must be right in any case."""

    def record(*args: object, **kwargs: object) -> Recording:
        if isinstance(graph, Exception):
            raise graph
        pair = SimpleNamespace(poison=lambda: None, untouched=lambda: True)
        return Recording(graph, pair, [])

    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(recorder, "record", record)
    monkeypatch.setattr(verify, "_foreign_bytes", lambda: 0)
    monkeypatch.setattr(verify.Run, "_results", lambda self, outputs, args: list(outputs))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    monkeypatch.setattr(Partition, "_keep", lambda self, graph: None)
    partition = _partition(
        1, True, Options(select="always", verify=verify_graphs), lambda args: [args[0] + 1]
    )
    entry = Entry()
    x = torch.ones(4)
    outputs = partition._record_and_verify(entry, [x])
    assert torch.equal(outputs[0], x + 1)
    return entry


@pytest.mark.parametrize("verify_graphs", [True, False])
def test_a_good_recording_is_captured(monkeypatch: pytest.MonkeyPatch, verify_graphs: bool) -> None:
    assert _record_and_verify(monkeypatch, _Graph(), verify_graphs).state is State.CAPTURED


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
    entry = _record_and_verify(monkeypatch, graph, verify_graphs)
    assert entry.state is State.REFUSED
    assert reason in entry.reason


def test_unexplained_words_are_refused_without_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = _record_and_verify(monkeypatch, _Graph(unexplained_words=1), verify_graphs=False)
    assert entry.state is State.REFUSED
    entry = _record_and_verify(monkeypatch, _Graph(unexplained_words=1), verify_graphs=True)
    assert entry.state is State.CAPTURED


def _worth(partition: Partition, **entry: float | bool) -> bool:
    return partition._is_worth_recording(Entry(**entry))  # type: ignore[arg-type]


def test_static_shapes_are_recorded_at_once_and_varying_ones_when_it_pays() -> None:
    partition = _partition(1, True)
    assert _worth(partition, has_numbers=False)
    assert not _worth(partition, has_numbers=True, uncaptured_seconds=0.01)
    assert _worth(partition, has_numbers=True, uncaptured_seconds=0.06)
    partition._recordings, partition._recording_seconds = 4, 0.4  # 0.1 s each
    assert not _worth(partition, uncaptured_seconds=0.09)
    assert _worth(partition, uncaptured_seconds=0.11)
    partition.reset()
    assert _worth(partition, has_numbers=False)


def test_a_dynamic_program_is_recorded_after_it_has_cost_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After 50 calls of a millisecond, as a recording is assumed to take 50."""
    partition = _partition(1, True)
    entry = Entry(has_numbers=True)
    calls = 0
    while not partition._is_worth_recording(entry):
        entry.uncaptured_seconds += 0.001
        calls += 1
    assert calls <= 51


def test_shapes_that_push_each_other_out_are_recorded_ever_less() -> None:
    partition = _partition(1, True, Options(max_graphs=4))
    partition._recordings, partition._recording_seconds = 4, 0.4  # 0.1 s each
    prices = []
    for dropped in (0, 3, 4, 8, 16):
        partition._dropped = dropped
        steps = range(10_000)
        prices.append(next(n for n in steps if _worth(partition, uncaptured_seconds=n / 100)) / 10)
    assert prices == [1, 1, 2, 4, 16]
