"""The parts of verification that need no GPU."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch

from pygraph import runtime
from pygraph.gpu import allocator
from pygraph.record.recorder import Recording
from pygraph.select.trial import REPLAYED, UNCAPTURED, Decision, Timing
from pygraph.verify import bits, verify
from pygraph.verify.rehearsal import POISON_ONES, Rehearsal

from .fake_engine import FakeGraph, Function, StandIns, Writing, add_one
from .stand_ins import verify_on_the_cpu


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    verify_on_the_cpu(monkeypatch)


def _rehearsal(
    graph: FakeGraph, function: Function = add_one, x: torch.Tensor | None = None, **recording: Any
) -> Rehearsal:
    """A function on one argument, and its graph. recording: further fields of it."""
    args = [torch.ones(4) if x is None else x]
    pair = recording.pop("pair", StandIns())
    return Rehearsal(function, args, Recording(graph, pair, [], **recording), frozenset())


def _check(rehearsal: Rehearsal, suspects: list[int]) -> verify.Verification:
    if suspects:
        return verify.thorough_check(rehearsal, suspects)
    return verify.quick_check(rehearsal)


def _checked(
    graph: FakeGraph, suspects: list[int], pair: StandIns | None = None
) -> verify.Verification:
    """Verifies a function that adds one; its result must be right whatever fails."""
    result = _check(_rehearsal(graph, pair=pair or StandIns()), suspects)
    assert torch.equal(result.outputs[0], torch.full((4,), 2.0))
    return result


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("step", ["poison", "replay"])
@pytest.mark.parametrize("suspects", [[], [0]])
def test_memory_that_verification_cannot_have_leaves_the_call_uncaptured(
    step: str, suspects: list[int]
) -> None:
    graph, pair = FakeGraph(), StandIns()
    error = torch.OutOfMemoryError(step)
    if step == "poison":
        pair.error = error
    else:
        graph.error = error
    assert _checked(graph, suspects, pair).failure == "verification ran out of memory"


@pytest.mark.usefixtures("stream")
def test_the_call_after_a_verification_without_memory_finds_what_graphs_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []

    def function(args: list[Any]) -> list[torch.Tensor]:
        made.append("call")
        return [args[0] + 1]

    graph = FakeGraph()
    graph.error = torch.OutOfMemoryError("no room")
    monkeypatch.setattr(runtime, "release_workspaces", lambda: made.append("release"))
    verify.quick_check(_rehearsal(graph, function))
    assert made == ["release", "call"]


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("suspects", [[], [0]])
def test_a_graph_that_cannot_be_launched_is_refused_with_the_drivers_words(
    suspects: list[int],
) -> None:
    graph = FakeGraph()
    graph.error = runtime.engine().DriverError("graph_launch: out of resources")
    result = _checked(graph, suspects)
    assert result.failure == "the graph cannot be launched: graph_launch: out of resources"


def _off_by(error: float, **members: Any) -> FakeGraph:
    """A graph that is always wrong by so much; large results are compared by fingerprint."""
    return FakeGraph(lambda args: [args[0] + 1 + error], **members)


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("error", [0.0, 1.0])
@pytest.mark.parametrize("donated", [[], [0]])
def test_only_replays_with_donated_memory_are_judged(donated: list[int], error: float) -> None:
    graph = _off_by(error, donated=donated)
    _checked(graph, [])
    assert graph.gave_away == [True]
    graph.gave_away.clear()
    _checked(graph, [0])
    if error == 0:
        assert graph.gave_away == [True] * 3
    elif not donated:
        assert graph.gave_away == [True] * 5
    else:  # two more show which elements nobody writes, and the others are judged by them
        assert graph.gave_away == [True] * 5 + [False] * 2 + [True] * 3


@pytest.mark.usefixtures("stream")
def test_a_graph_that_is_wrong_in_donated_memory_is_refused() -> None:
    graph = FakeGraph(lambda args: [args[0] + 1 + (1.0 if graph.gave_away[-1] else 0.0)], donated=[0])
    assert list(_checked(graph, []).suspects) == [0]
    assert "1 of 1 results differ" in _checked(graph, [0]).failure


@pytest.mark.usefixtures("stream")
def test_results_of_replays_are_not_kept_beside_those_of_later_runs() -> None:
    results: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def tracked(args: list[torch.Tensor]) -> list[torch.Tensor]:
        result = args[0] + 1
        results.append(weakref.ref(result))
        return [result]

    def uncaptured(args: list[torch.Tensor]) -> list[torch.Tensor]:
        alive.append(sum(result() is not None for result in results))
        return [args[0] + 1]

    rehearsal = _rehearsal(FakeGraph(tracked), uncaptured)
    assert verify.thorough_check(rehearsal, [0]).failure == ""
    assert len(results) == 3
    assert alive == [1, 0, 0, 0]  # the first run is compared with a replay


@pytest.mark.usefixtures("stream")
def test_what_nobody_writes_is_no_mistake_in_donated_memory() -> None:
    """Padding of a result in donated memory has what was there; fresh memory shows that it is none."""

    def padded(args: list[torch.Tensor]) -> list[torch.Tensor]:
        result = args[0] + 1
        bits = 7 if graph.gave_away[-1] else -1 if graph.poisons[-1] == POISON_ONES else 0
        result.view(torch.int32)[0] = bits
        return [result]

    graph = FakeGraph(padded, donated=[0])
    uncaptured = torch.tensor([5.0, 2.0, 2.0, 2.0])
    rehearsal = _rehearsal(graph, lambda args: [uncaptured.clone()])
    assert verify.thorough_check(rehearsal, [0]).failure == ""


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("output_bytes", [0, 1 << 40])
def test_a_result_that_differs_is_checked_thoroughly_and_refused(output_bytes: int) -> None:
    assert _checked(_off_by(0, output_bytes=output_bytes), []).suspects == []
    wrong = _off_by(1e-6, output_bytes=output_bytes)
    first = _checked(wrong, [])
    assert (first.failure, first.suspects) == ("", [0])
    failure = _checked(wrong, [0]).failure
    assert "1 of 1 results differ" in failure
    assert "result 0 by 0 elements and 4.8e-07 of the norm, another uncaptured run by 0" in failure


_TIMING = Timing(host=1e-3, device=1e-3, latency=1e-3, noise=0.0, memory=0)
_KEPT = Decision(REPLAYED, {UNCAPTURED: _TIMING, REPLAYED: _TIMING})


def _check_of_a_later_process(
    graph: FakeGraph, known: tuple[int, ...], function: Function
) -> verify.Verification:
    """known: the suspects of an earlier process."""
    result = verify.verify(_rehearsal(graph, function), kept=dataclasses.replace(_KEPT, suspects=known))
    assert torch.equal(result.outputs[0], torch.full((4,), 2.0))
    return result


class _Sums:
    """Adds one, and two. Sums are rounded in another way each time."""

    def __init__(self, inexact: tuple[int, ...] = (), wrong: tuple[int, ...] = ()) -> None:
        self.calls = 0
        self._inexact, self._wrong = inexact, wrong

    def __call__(self, args: list[torch.Tensor]) -> list[torch.Tensor]:
        self.calls += 1
        results = [args[0] + 1, args[0] + 2]
        for i in self._inexact:
            results[i] = results[i] * (1 + self.calls * 2**-20)
        for i in self._wrong:
            results[i] = results[i] + 1
        return results


@pytest.fixture
def later(stream: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_foreign_bytes", lambda: 0)


@pytest.mark.usefixtures("later")
def test_known_suspects_are_checked_thoroughly_in_the_same_call() -> None:
    graph, function = FakeGraph(_Sums(inexact=(1,))), _Sums(inexact=(1,))
    result = _check_of_a_later_process(graph, (1,), function)
    assert (result.failure, list(result.suspects)) == ("", [])
    assert graph.replays == 1 + 3  # the quick check's, and the thorough one's
    assert function.calls == 3 + 1


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("known", [(), (0,), (0, 1), (1,), (0, 1, 2, 1 << 40)])
@pytest.mark.parametrize("wrong", [0, 1])
def test_what_is_known_of_suspects_accepts_no_wrong_result(known: tuple[int, ...], wrong: int) -> None:
    """What is on disk may be of another program, or broken."""
    graph = FakeGraph(_Sums(wrong=(wrong,)))
    result = _check_of_a_later_process(graph, known, _Sums())
    if wrong in known:
        assert "1 of 2 results differ" in result.failure
    else:
        assert (result.failure, list(result.suspects)) == ("", [wrong])


@pytest.mark.usefixtures("later")
def test_suspects_that_were_not_known_are_left_to_the_next_call() -> None:
    graph, function = FakeGraph(_Sums(inexact=(1,))), _Sums(inexact=(1,))
    result = _check_of_a_later_process(graph, (0,), function)
    assert (result.failure, list(result.suspects)) == ("", [1])


def test_inputs_that_nobody_sees_after_the_call_are_no_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiled code may leave anything in a saved tensor that it was given."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(allocator, "give_back", lambda after: None)
    recording = Recording(FakeGraph(), StandIns(), [], given_away=frozenset({0}))
    args = [torch.ones(1), torch.full((1,), 2.0)]
    rehearsal = Rehearsal(lambda args: [torch.zeros(1)], args, recording, frozenset({0, 1}))
    assert [int(result) for result in rehearsal.results_of_call(rehearsal.call())] == [0, 2]


@pytest.mark.usefixtures("stream")
def test_a_graph_that_writes_where_it_was_recorded_is_refused() -> None:
    pair = StandIns()
    assert "memory it was recorded with" in _checked(Writing(pair), [], pair).failure


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_write_of_any_replay_is_seen(number: int) -> None:
    pair = StandIns()
    graph = Writing(pair, number)
    kept = dataclasses.replace(_KEPT, suspects=(0,))
    result = verify.verify(_rehearsal(graph, pair=pair), kept=kept)
    assert "memory it was recorded with" in result.failure
    pair = StandIns()
    if number < 4:
        assert "memory it was recorded with" in _checked(Writing(pair, number), [0], pair).failure


@pytest.mark.usefixtures("stream")
def test_a_result_that_is_an_argument_is_not_compared_with_itself() -> None:
    x = torch.ones(4)
    identity = FakeGraph(lambda args: [args[0]])  # should have doubled it
    rehearsal = _rehearsal(identity, lambda args: [args[0].mul_(2)], x, returned=frozenset({0}))
    assert list(verify.quick_check(rehearsal).suspects) == [0]
    assert torch.equal(x, torch.full((4,), 2.0))


@pytest.mark.usefixtures("stream")
def test_writes_of_rehearsals_count_for_none_of_the_calls_tensors() -> None:
    x = torch.ones(4)
    _rehearsal(FakeGraph(), lambda args: [args[0].mul_(1) + 1], x).run_uncaptured([0])
    assert x._version == 0


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("limit", [15, 16])
def test_large_results_are_not_kept_until_the_call(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Nor those that are no outputs: inputs that the graph writes."""
    replayed: list[weakref.ref[torch.Tensor]] = []

    def tracked(args: list[torch.Tensor]) -> list[torch.Tensor]:
        result = args[0] + 1
        replayed.append(weakref.ref(result))
        return [result]

    def function(args: list[torch.Tensor]) -> list[torch.Tensor]:
        assert (replayed[0]() is not None) == (limit == 16)
        return [args[0] + 1]

    monkeypatch.setattr(verify, "LARGE_BYTES", limit)
    result = verify.quick_check(_rehearsal(FakeGraph(tracked), function))
    assert (result.failure, list(result.suspects)) == ("", [])


@pytest.mark.usefixtures("stream")
def test_results_that_do_not_fit_beside_their_fingerprints_are_gone_before_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replayed: list[weakref.ref[torch.Tensor]] = []

    def fingerprints(results: list[torch.Tensor]) -> list[int]:
        replayed.extend(map(weakref.ref, results))
        raise torch.OutOfMemoryError("of fingerprints")

    def function(args: list[Any]) -> list[torch.Tensor]:
        (x,) = args
        args.clear()
        assert replayed and all(result() is None for result in replayed)
        return [x + 1]

    monkeypatch.setattr(bits, "fingerprints", fingerprints)
    result = verify.quick_check(_rehearsal(FakeGraph(output_bytes=1 << 40), function))
    assert result.failure == "verification ran out of memory"
