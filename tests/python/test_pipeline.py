"""One call that is recorded and verified, with stand-ins for the recording and the graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraph import runtime
from pygraph.gpu import allocator
from pygraph.options import Options
from pygraph.partition.attempt import Attempt
from pygraph.partition.call import Call, Function, SideEffects
from pygraph.partition.pipeline import attempt
from pygraph.partition.signature import Pending
from pygraph.record import recorder
from pygraph.record.recorder import Recording, Request
from pygraph.select.trial import REPLAYED, UNCAPTURED, Decision, Timing
from pygraph.verify import verify
from pygraph.verify.rehearsal import Rehearsal

from .fake_engine import FakeGraph, StandIns, Writing, add_one
from .stand_ins import INFO, FullGpu


def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification on CPU tensors."""
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(verify, "_foreign_bytes", lambda: 0)
    monkeypatch.setattr(Rehearsal, "_results", lambda self, outputs, args: list(outputs))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)


def _call(function: Function, args: list[Any], **options: Any) -> Call:
    return Call(function, function, args, INFO, Options(**options))


def _attempt(
    monkeypatch: pytest.MonkeyPatch, graph: FakeGraph | Exception, verify_graphs: bool
) -> Attempt:
    """One second call with a recording that yields ``graph``; the result must be right in any case."""

    def record(request: Request) -> Recording:
        if isinstance(graph, Exception):
            raise graph
        return Recording(graph, StandIns(), [])

    _without_gpu(monkeypatch)
    monkeypatch.setattr(recorder, "record", record)
    x = torch.ones(4)
    result = attempt(_call(add_one, [x], verify=verify_graphs))
    assert torch.equal(result.outputs[0], x + 1)
    return result


def _unlaunchable() -> FakeGraph:
    graph = FakeGraph()
    graph.error = runtime.engine().DriverError("graph_launch failed")
    return graph


@pytest.mark.parametrize("verify_graphs", [True, False])
def test_a_good_recording_is_captured(monkeypatch: pytest.MonkeyPatch, verify_graphs: bool) -> None:
    graph = FakeGraph()
    assert _attempt(monkeypatch, graph, verify_graphs).graph is graph


@pytest.mark.parametrize("verify_graphs", [True, False])
@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (torch.OutOfMemoryError("no"), "recording ran out of memory"),
        (RuntimeError("sync while capturing\nmore"), "RuntimeError: sync while capturing"),
        (_unlaunchable(), "graph_launch failed"),
    ],
)
def test_a_failure_leaves_the_call_uncaptured_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, graph: FakeGraph | Exception, reason: str, verify_graphs: bool
) -> None:
    result = _attempt(monkeypatch, graph, verify_graphs)
    assert result.graph is None
    assert reason in result.failure


def test_what_a_failed_recording_has_taken_is_free_before_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the uncaptured run would need memory that without PyGraph it has."""
    gpu = FullGpu()
    given_back: list[bool] = []
    monkeypatch.setattr(recorder, "record", gpu.fail)
    monkeypatch.setattr(allocator, "give_back_all", lambda: given_back.append(gpu.is_free))

    def function(args: list[torch.Tensor]) -> list[torch.Tensor]:
        assert gpu.is_free
        assert given_back == [True]
        return [args[0] + 1]

    args = [torch.ones(4)]
    result = attempt(_call(function, args))
    assert result.failure == "recording ran out of memory"
    assert gpu.calls == 1


def test_unexplained_words_are_refused_without_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = FakeGraph(unexplained_words=1)
    assert _attempt(monkeypatch, graph, verify_graphs=False).graph is None
    assert _attempt(monkeypatch, graph, verify_graphs=True).graph is graph


def test_the_graph_that_is_used_is_the_one_whose_other_results_were_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second recording would be another graph, of which only the suspects were looked at."""

    class Flipping(FakeGraph):
        """Differs in its second result at the first replay, as sums by atomic additions may."""

        def __init__(self) -> None:
            super().__init__(self._flip)

        def _flip(self, args: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            return [args[0] + 1, args[0] + (2 + 2**-20 if self.replays == 1 else 2)]

    def function(args: list[torch.Tensor]) -> list[torch.Tensor]:
        return [args[0] + 1, args[0] + 2]

    graphs: list[Flipping] = []

    def record(request: Request) -> Recording:
        graphs.append(Flipping())
        return Recording(graphs[-1], StandIns(), [])

    _without_gpu(monkeypatch)
    monkeypatch.setattr(recorder, "record", record)
    call = _call(function, [torch.ones(4)])
    first = attempt(call)
    assert first.graph is None
    assert first.pending is not None
    assert list(first.pending.suspects) == [1]
    second = attempt(dataclasses.replace(call, pending=first.pending))
    assert len(graphs) == 1
    assert second.graph is graphs[0]


@pytest.mark.parametrize("suspects", [[], [0]])
def test_a_stream_that_a_graph_cannot_be_replayed_on_yet_refuses_nothing(
    monkeypatch: pytest.MonkeyPatch, suspects: list[int]
) -> None:
    """Suspects may be checked in another thread, on another stream than the graph was replayed on."""
    graph = FakeGraph()
    graph.error = runtime.engine().StreamNotReady("replays on other streams are not complete")
    recording = Recording(graph, StandIns(), [])
    _without_gpu(monkeypatch)
    monkeypatch.setattr(recorder, "record", lambda request: recording)
    call = _call(add_one, [torch.ones(4)])
    if suspects:
        call = dataclasses.replace(call, pending=Pending(recording, suspects, 0))
    result = attempt(call)
    assert torch.equal(result.outputs[0], torch.full((4,), 2.0))
    assert result.is_transient and result.graph is None


def test_a_graph_that_does_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(request: Request) -> Recording:
        pair = StandIns()
        return Recording(Writing(pair), pair, [])

    _without_gpu(monkeypatch)
    monkeypatch.setattr(recorder, "record", record)
    result = attempt(_call(add_one, [torch.ones(4)]))
    assert result.graph is None
    assert result.failure.startswith("verification failed")


@pytest.mark.parametrize("verify_graphs", [True, False])
def test_branches_are_for_graphs_that_are_verified(
    monkeypatch: pytest.MonkeyPatch, verify_graphs: bool
) -> None:
    asked: list[int] = []

    def record(request: Request) -> Recording:
        asked.append(request.lanes)
        raise RuntimeError("enough")

    monkeypatch.setattr(recorder, "record", record)
    attempt(_call(list, [torch.ones(4)], lanes=8, verify=verify_graphs))
    assert asked == [8 if verify_graphs else 1]


_TIMING = Timing(host=1e-3, device=1e-3, latency=1e-3, noise=0.0, memory=0)
_KEPT = Decision(REPLAYED, {UNCAPTURED: _TIMING, REPLAYED: _TIMING})


@pytest.mark.parametrize(
    ("branches", "verify_graphs", "lanes"),
    [(False, True, 1), (True, True, 8), (None, True, 8), (True, False, 1)],
)
def test_a_graph_that_kept_its_order_in_an_earlier_process_is_linked_as_a_chain_only(
    monkeypatch: pytest.MonkeyPatch, branches: bool | None, verify_graphs: bool, lanes: int
) -> None:
    asked: list[int] = []

    def record(request: Request) -> Recording:
        asked.append(request.lanes)
        raise RuntimeError("enough")

    monkeypatch.setattr(recorder, "record", record)
    call = _call(list, [torch.ones(4)], lanes=8, verify=verify_graphs)
    attempt(dataclasses.replace(call, kept=dataclasses.replace(_KEPT, branches=branches)))
    assert asked == [lanes]


def test_known_suspects_do_not_wait_for_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(args: list[torch.Tensor]) -> list[torch.Tensor]:
        calls.append(None)
        return [args[0] + 1, args[0] * (1 + len(calls) * 2**-20)]

    calls: list[None] = []
    graph = FakeGraph(rounded)
    _without_gpu(monkeypatch)
    monkeypatch.setattr(recorder, "record", lambda request: Recording(graph, StandIns(), []))
    call = _call(rounded, [torch.ones(4)])
    kept = dataclasses.replace(_KEPT, suspects=(1,))
    result = attempt(dataclasses.replace(call, kept=kept))
    assert (result.graph, result.pending, result.failure) == (graph, None, "")


def test_under_hooks_of_saved_tensors_no_graph_saves_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here every result is on the CPU, as the random state of uncaptured attention is."""
    with torch.autograd.graph.save_on_cpu():
        result = _attempt(monkeypatch, FakeGraph(), verify_graphs=True)
    assert result.graph is None and "hooks of saved tensors" in result.failure
    assert _attempt(monkeypatch, FakeGraph(), verify_graphs=True).graph is not None


def test_under_hooks_no_unverified_graph_saves_a_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compared, so what an uncaptured run would save on the CPU is not known."""
    graph = FakeGraph()
    _without_gpu(monkeypatch)
    monkeypatch.setattr(recorder, "record", lambda request: Recording(graph, StandIns(), []))
    call = _call(add_one, [torch.ones(4)], verify=False)
    with torch.autograd.graph.save_on_cpu():
        result = attempt(dataclasses.replace(call, effects=SideEffects(draws=True)))
    assert result.graph is None and "hooks of saved tensors" in result.failure
    assert torch.equal(result.outputs[0], torch.ones(4) + 1)
