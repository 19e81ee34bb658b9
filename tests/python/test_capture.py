"""One call that is recorded and verified, with stand-ins for the recording and the graph."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pygraph.gpu import allocator
from pygraph.options import Options
from pygraph.partition.capture import Attempt, SideEffects, attempt
from pygraph.record import recorder
from pygraph.record.recorder import Recording
from pygraph.verify import verify

from .stand_ins import INFO, FullGpu, Graph


def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification on CPU tensors."""
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(verify, "_foreign_bytes", lambda: 0)
    monkeypatch.setattr(verify.Run, "_results", lambda self, outputs, args: list(outputs))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)


def _attempt(monkeypatch: pytest.MonkeyPatch, graph: Graph | Exception, verify_graphs: bool) -> Attempt:
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
    result = attempt(add_one, add_one, [x], INFO, options, SideEffects(), True, None)
    assert torch.equal(result.outputs[0], x + 1)
    return result


@pytest.mark.parametrize("verify_graphs", [True, False])
def test_a_good_recording_is_captured(monkeypatch: pytest.MonkeyPatch, verify_graphs: bool) -> None:
    graph = Graph()
    assert _attempt(monkeypatch, graph, verify_graphs).graph is graph


@pytest.mark.parametrize("verify_graphs", [True, False])
@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (torch.OutOfMemoryError("no"), "recording ran out of memory"),
        (RuntimeError("sync while capturing\nmore"), "RuntimeError: sync while capturing"),
        (Graph(launches=False), "graph_launch failed"),
    ],
)
def test_a_failure_leaves_the_call_uncaptured_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, graph: Graph | Exception, reason: str, verify_graphs: bool
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
    result = attempt(function, function, args, INFO, Options(), SideEffects(), True, None)
    assert result.failure == "recording ran out of memory"
    assert gpu.calls == 1


def test_unexplained_words_are_refused_without_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph(unexplained_words=1)
    assert _attempt(monkeypatch, graph, verify_graphs=False).graph is None
    assert _attempt(monkeypatch, graph, verify_graphs=True).graph is graph


def test_the_graph_that_is_used_is_the_one_whose_other_results_were_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second recording would be another graph, of which only the suspects were looked at."""

    class Flipping(Graph):
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
    common = (INFO, Options(), SideEffects(), True)
    first = attempt(function, function, [x], *common, None)
    assert first.graph is None
    assert first.pending is not None
    assert list(first.pending.suspects) == [1]
    second = attempt(function, function, [x], *common, first.pending)
    assert len(graphs) == 1
    assert second.graph is graphs[0]


@pytest.mark.parametrize("use", ["", "operator my::op, node 0, a copy perhaps uses other memory"])
def test_a_graph_that_does_something_else_is_refused_with_what_it_perhaps_uses(
    monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    class Touching(Graph):
        pair = SimpleNamespace(poison=lambda: None, untouched=lambda: False)
        doubtful_use = use

    _without_gpu(monkeypatch)
    monkeypatch.setattr(recorder, "record", lambda *a, **k: Recording(Touching(), Touching.pair, []))

    def add_one(args: list[torch.Tensor]) -> list[torch.Tensor]:
        return [args[0] + 1]

    result = attempt(add_one, add_one, [torch.ones(4)], INFO, Options(), SideEffects(), True, None)
    assert result.graph is None
    assert result.failure.startswith("verification failed")
    assert result.failure.endswith(f"; {use}" if use else "it was recorded with")


@pytest.mark.parametrize("verify_graphs", [True, False])
def test_branches_are_for_graphs_that_are_verified(
    monkeypatch: pytest.MonkeyPatch, verify_graphs: bool
) -> None:
    asked: dict[str, object] = {}

    def record(*args: object, **kwargs: object) -> Recording:
        asked.update(kwargs)
        raise RuntimeError("enough")

    monkeypatch.setattr(recorder, "record", record)
    options = Options(lanes=8, verify=verify_graphs)
    attempt(list, list, [torch.ones(4)], INFO, options, SideEffects(), True, None)
    assert asked["lanes"] == (8 if verify_graphs else 1)
