"""Signatures whose graph cannot serve their calls: recorded anew."""

from __future__ import annotations

import dataclasses
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from pygraph import runtime
from pygraph.gpu import allocator
from pygraph.options import Options
from pygraph.partition import pipeline
from pygraph.partition.attempt import Attempt, record_and_link
from pygraph.partition.call import Call
from pygraph.partition.partition import Partition
from pygraph.partition.recording_policy import RecordingPolicy
from pygraph.partition.selector import Selector
from pygraph.partition.signature import Entry, Pending, State
from pygraph.record import recorder, stream_capture
from pygraph.record.recorder import Recording
from pygraph.select.trial import REPLAYED, UNCAPTURED, Trial

from .fake_engine import FakeGraph, StandIns
from .stand_ins import INFO, call


class _Misfit(FakeGraph):
    """Calls do not give away what it would use."""

    def gives_away(self, arguments: list[Any]) -> bool:
        return False


@pytest.mark.parametrize(("replays_between", "calls"), [(0, 8), (1, 15), (2, None)])
def test_calls_that_keep_what_a_graph_uses_are_uncaptured_and_get_another_one_if_they_go_on(
    told_to_the_engine: list[int],
    monkeypatch: pytest.MonkeyPatch,
    replays_between: int,
    calls: int | None,
) -> None:
    taken: list[object] = []
    removed: list[object] = []

    def attempt(call: Call) -> Attempt:
        taken.append(call.may_donate)
        return Attempt(list(call.args), _Misfit(donated=[0], replays=1000))

    monkeypatch.setattr(pipeline, "attempt", attempt)
    engine = runtime.engine()
    monkeypatch.setattr(engine, "given_away", lambda args: [], raising=False)
    monkeypatch.setattr(
        engine, "remove_graph", lambda function, graph: removed.append(graph), raising=False
    )
    partition = Partition(lambda args: list(args), INFO, Options(select="always"))
    for _ in range(2):
        entry = call(partition, None)
    graph = entry.graph
    assert isinstance(graph, FakeGraph)
    fresh, count = entry, 0
    while fresh is entry and count < 100:
        graph.replays += replays_between
        fresh = call(partition, None)
        count += 1
    if calls is None:
        assert not removed
        return
    assert count == calls
    assert removed == [graph]
    assert (fresh.state, fresh.graph) == (State.UNCAPTURED, None)
    call(partition, None)
    assert taken == [True, False]  # the new one leaves that memory alone


@pytest.mark.parametrize("replays", [10, 100_000])
def test_calls_that_give_their_arguments_away_in_other_storages_get_a_graph_for_these(
    told_to_the_engine: list[int], monkeypatch: pytest.MonkeyPatch, replays: int
) -> None:
    """At most three times in a row: storages that differ from call to call fit no graph."""
    taken: list[bool] = []

    def attempt(call: Call) -> Attempt:
        taken.append(call.may_donate)
        donated = [0] if call.may_donate else []
        return Attempt(list(call.args), _Misfit(donated=donated, replays=replays))

    monkeypatch.setattr(pipeline, "attempt", attempt)
    engine = runtime.engine()
    groups = [SimpleNamespace(positions=[0])]
    monkeypatch.setattr(engine, "given_away", lambda args: groups, raising=False)
    monkeypatch.setattr(engine, "remove_graph", lambda function, graph: None, raising=False)
    partition = Partition(lambda args: list(args), INFO, Options(select="always"))
    for _ in range(60):
        entry = call(partition, None)
    if replays == 10:
        assert taken == [True, True, True, False]
        assert entry.state is State.CAPTURED
    else:  # each was in use for a long time
        assert len(taken) >= 6
        assert all(taken)


def test_a_signature_that_is_recorded_again_does_not_wait_again(
    told_to_the_engine: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its uncaptured calls have taken as long as a recording."""
    waits: list[float] = []
    made: list[object] = []  # calls
    recordings: list[int] = []

    def attempt(call: Call) -> Attempt:
        recordings.append(len(made))
        return Attempt(list(call.args), _Misfit(donated=[0]))

    monkeypatch.setattr(pipeline, "attempt", attempt)
    # Recordings take longer than was assumed.
    price = lambda self, *args, **kwargs: 2.0 + len(recordings)  # noqa: E731
    monkeypatch.setattr(RecordingPolicy, "seconds_to_wait", price)
    engine = runtime.engine()
    groups = [SimpleNamespace(positions=[0])]
    monkeypatch.setattr(engine, "given_away", lambda args: groups, raising=False)
    monkeypatch.setattr(engine, "remove_graph", lambda function, graph: None, raising=False)
    monkeypatch.setattr(engine, "wait", lambda callable, key, seconds: waits.append(seconds))
    partition = Partition(lambda args: list(args), INFO, Options(select="always"))
    for _ in range(20):
        made.append(call(partition, None))
    assert waits == [2.0]
    first, second, *_ = recordings
    assert second - first == 9  # after eight that did not fit


def test_a_suspected_graph_that_no_call_can_check_is_recorded_anew_with_a_report(
    told_to_the_engine: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be right: what differs may be left to chance."""
    graph = _Misfit(donated=[0])
    monkeypatch.setattr(pipeline, "attempt", lambda call: Attempt(list(call.args), graph))
    removed: list[object] = []
    engine = runtime.engine()
    monkeypatch.setattr(engine, "given_away", lambda args: [], raising=False)
    monkeypatch.setattr(
        engine, "remove_graph", lambda function, graph: removed.append(graph), raising=False
    )
    partition = Partition(lambda args: list(args), INFO, Options(select="always"))
    entry = [call(partition, None) for _ in range(2)][-1]
    entry.audits.suspects = (3,)
    caplog.clear()
    for _ in range(7):
        assert call(partition, None) is entry
    assert not caplog.records
    fresh = call(partition, None)
    assert removed == [graph]
    assert (fresh.state, fresh.graph) == (State.UNCAPTURED, None)
    (key,) = partition.entries
    for _ in range(8):  # calls of another thread, which has looked at the entry before
        partition._unservable_call(key, entry, [None])
    assert partition.entries[key] is fresh
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "an audit found result 3 to differ" in warning


def test_a_call_whose_stream_cannot_be_asked_runs_uncaptured(
    told_to_the_engine: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(FakeGraph):
        def gives_away(self, arguments: list[Any]) -> bool:
            raise RuntimeError("cannot get the current CUDA stream")

    graph = Asked(donated=[0])
    monkeypatch.setattr(pipeline, "attempt", lambda call: Attempt(list(call.args), graph))
    partition = Partition(lambda args: ["uncaptured"], INFO, Options(select="always"))
    for _ in range(2):
        partition._miss([None])
    assert partition._miss([None]) == ["uncaptured"]


def test_a_trial_does_not_replay_a_graph_that_another_thread_found_suspect(
    told_to_the_engine: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did so between this thread's look at the audits and the trial's call."""
    graph = FakeGraph()
    monkeypatch.setattr(pipeline, "attempt", lambda call: Attempt(list(call.args), graph))
    partition = Partition(lambda args: list(args), INFO, Options(select="always"))
    entry = [call(partition, None) for _ in range(2)][-1]
    entry.measure(Trial({UNCAPTURED: 0, REPLAYED: 0}))
    trial_call = Selector.run_trial_call

    def found_meanwhile(selector: Selector, key: bytes, entry: Entry, args: list[Any]) -> Any:
        entry.audits.suspects = (0,)
        return trial_call(selector, key, entry, args)

    made: list[str] = []
    monkeypatch.setattr(Selector, "run_trial_call", found_meanwhile)
    monkeypatch.setattr(
        Selector, "_try", lambda self, key, entry, trial, args: made.append("trial") or ["replayed"]
    )
    assert partition._miss([None]) == [None]
    assert not made


def test_a_forwards_gradients_are_those_of_its_dense_inputs_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests: list[Any] = []

    def record(request: Any) -> Any:
        requests.append(request)
        raise RuntimeError("recorded")

    monkeypatch.setattr(recorder, "record", record)
    monkeypatch.setattr(stream_capture, "check_abandoned", lambda: None)
    monkeypatch.setattr(allocator, "give_back_all", lambda: None)
    with FakeTensorMode():
        dense = torch.empty(4, 8, device="cuda", requires_grad=True)
        indices = torch.zeros(1, 3, dtype=torch.int64, device="cuda")
        values = torch.ones(3, device="cuda")
        sparse = torch.sparse_coo_tensor(indices, values, (9,), check_invariants=False).requires_grad_()
        args = [dense, dense.detach(), sparse, torch.empty(5, requires_grad=True), 3]
    for kind in ("forward", "backward", "inference"):
        info = dataclasses.replace(INFO, kind=kind)
        record_and_link(Call(list, list, args, info, Options(), may_donate=False), set())
    assert [list(request.gradients) for request in requests] == [[4 * 8 * 4], [], []]


class _Forward(FakeGraph):
    """Says which outputs it laid out."""

    def __init__(self) -> None:
        super().__init__()
        self.laid_out: list[Any] = []

    def join_saved(self, outputs: list[Any]) -> None:
        self.laid_out.append(outputs.copy())
        outputs[0] = "laid out"


@pytest.mark.parametrize("kind", ["forward", "backward", "inference"])
@pytest.mark.parametrize("is_pending", [False, True])
@pytest.mark.parametrize("as_type", [list, tuple])
def test_what_a_forward_saves_is_laid_out_as_by_its_graph(
    told_to_the_engine: list[int],
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    is_pending: bool,
    as_type: Any,
) -> None:
    """From the call on in which it is recorded, also if that call leaves suspects."""
    graph = _Forward()
    pending = Pending(Recording(graph, StandIns(), []), [0], 0) if is_pending else None  # type: ignore[arg-type]

    def attempt(call: Call) -> Attempt:
        return Attempt(as_type(["uncaptured"]), None if is_pending else graph, pending=pending)

    monkeypatch.setattr(pipeline, "attempt", attempt)
    info = dataclasses.replace(INFO, kind=kind)
    partition = Partition(lambda args: as_type(["uncaptured"]), info, Options(select="always"))
    outputs = [partition._miss([None]) for _ in range(3)]
    assert outputs[0] == as_type(["uncaptured"])
    assert outputs[1] == as_type(["laid out" if kind == "forward" else "uncaptured"])
    assert bool(graph.laid_out) == (kind == "forward")


class _Saved:
    """A tensor."""


@pytest.mark.parametrize("as_type", [list, tuple])
def test_what_is_laid_out_anew_is_freed_at_once(
    told_to_the_engine: list[int], monkeypatch: pytest.MonkeyPatch, as_type: Any
) -> None:
    """Also while Dynamo evaluates frames: Python's caller holds the arguments of a call then."""
    saved: list[weakref.ref[_Saved]] = []
    left: list[int] = []

    class Joining(FakeGraph):
        def join_saved(self, outputs: list[Any]) -> None:
            for i in range(len(outputs)):
                outputs[i] = "laid out"
                left.append(sum(ref() is not None for ref in saved[-3:]))

    def function(args: list[Any]) -> Any:
        outputs = as_type(_Saved() for _ in range(3))
        saved.extend(map(weakref.ref, outputs))
        return outputs

    monkeypatch.setattr(pipeline, "attempt", lambda call: Attempt(function(call.args), Joining()))
    monkeypatch.setattr(Selector, "recheck", lambda self, key, entry, args: function(args))
    info = dataclasses.replace(INFO, kind="forward")
    partition = Partition(function, info, Options(select="always"))
    for _ in range(2):
        partition._miss([None])
    left.clear()
    torch._dynamo.run(lambda: partition._miss([None]))()
    assert left == [2, 1, 0]


def test_what_a_forward_saves_stays_as_it_is_if_it_cannot_be_laid_out(
    told_to_the_engine: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(FakeGraph):
        def join_saved(self, outputs: list[Any]) -> None:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(pipeline, "attempt", lambda call: Attempt(["uncaptured"], Failing()))
    info = dataclasses.replace(INFO, kind="forward")
    partition = Partition(lambda args: ["uncaptured"], info, Options(select="always"))
    assert [partition._miss([None]) for _ in range(3)] == [["uncaptured"]] * 3
