"""The parts of verification that need no GPU."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraph import runtime
from pygraph.record.recorder import Recording
from pygraph.verify import verify

from .stand_ins import verify_on_the_cpu


class _Refusing:
    """A graph and a recording pair that fail at one step."""

    output_bytes = 0
    donated: tuple[int, ...] = ()

    def __init__(self, refused: str, error: Exception) -> None:
        self._refused = refused
        self._error = error

    def _step(self, name: str) -> None:
        if name == self._refused:
            raise self._error

    def poison(self) -> None:
        self._step("poison")

    def release_workspace(self) -> None:
        pass

    def replay(
        self, arguments: list[torch.Tensor], gives_away: bool, poison: int
    ) -> list[torch.Tensor]:
        self._step("replay")
        return [arguments[0] + 1]

    def untouched(self) -> bool:
        return True


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    verify_on_the_cpu(monkeypatch)


def _look(graph: Any, suspects: list[int], pair: Any = None) -> verify.Verification:
    """Verifies a function that adds one; its result must be right whatever fails."""
    x = torch.ones(4)
    recording = Recording(graph, pair or graph, [])
    run = verify.Run(lambda args: [args[0] + 1], [x], recording, frozenset())
    result = run.closer_look(suspects) if suspects else run.first_look()
    assert torch.equal(result.outputs[0], x + 1)
    return result


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("step", ["poison", "replay"])
@pytest.mark.parametrize("suspects", [[], [0]])
def test_memory_that_verification_cannot_have_leaves_the_call_uncaptured(
    step: str, suspects: list[int]
) -> None:
    result = _look(_Refusing(step, torch.OutOfMemoryError(step)), suspects)
    assert result.failure == "verification ran out of memory"


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("suspects", [[], [0]])
def test_a_graph_that_cannot_be_launched_is_refused_with_the_drivers_words(
    suspects: list[int],
) -> None:
    error = runtime.engine().DriverError("graph_launch: out of resources")
    result = _look(_Refusing("replay", error), suspects)
    assert result.failure == "the graph cannot be launched: graph_launch: out of resources"


class _Wrong(_Refusing):
    """A graph that is always off by ``error``, of which large results are compared by fingerprint."""

    def __init__(self, error: float, output_bytes: int) -> None:
        super().__init__("", RuntimeError())
        self.output_bytes = output_bytes
        self.given_away: list[bool] = []  # by replay
        self._off = error

    def replay(
        self, arguments: list[torch.Tensor], gives_away: bool, poison: int
    ) -> list[torch.Tensor]:
        self.given_away.append(gives_away)
        return [arguments[0] + 1 + self._off]


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("error", [0.0, 1.0])
@pytest.mark.parametrize("donated", [(), (0,)])
def test_only_replays_with_donated_memory_are_judged(donated: tuple[int, ...], error: float) -> None:
    graph = _Wrong(error, 0)
    graph.donated = donated
    _look(graph, [])
    assert graph.given_away == [True]
    graph.given_away.clear()
    _look(graph, [0])
    if error == 0:
        assert graph.given_away == [True] * 3
    elif not donated:
        assert graph.given_away == [True] * 5
    else:  # two more show which elements nobody writes, and the others are judged by them
        assert graph.given_away == [True] * 5 + [False] * 2 + [True] * 3


@pytest.mark.usefixtures("stream")
def test_a_graph_that_is_wrong_in_donated_memory_is_refused() -> None:
    class WrongIfDonated(_Wrong):
        donated = (0,)

        def replay(
            self, arguments: list[torch.Tensor], gives_away: bool, poison: int
        ) -> list[torch.Tensor]:
            return [arguments[0] + 1 + (self._off if gives_away else 0)]

    graph = WrongIfDonated(1.0, 0)
    assert list(_look(graph, []).suspects) == [0]
    assert "1 of 1 results differ" in _look(graph, [0]).failure


@pytest.mark.usefixtures("stream")
def test_results_of_replays_are_not_kept_beside_those_of_later_runs() -> None:
    results: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    class Tracked(_Wrong):
        def replay(
            self, arguments: list[torch.Tensor], gives_away: bool, poison: int
        ) -> list[torch.Tensor]:
            (result,) = super().replay(arguments, gives_away, poison)
            results.append(weakref.ref(result))
            return [result]

    def uncaptured(args: list[torch.Tensor]) -> list[torch.Tensor]:
        alive.append(sum(result() is not None for result in results))
        return [args[0] + 1]

    recording = Recording(graph := Tracked(0.0, 0), graph, [])
    run = verify.Run(uncaptured, [torch.ones(4)], recording, frozenset())
    assert run.closer_look([0]).failure == ""
    assert len(results) == 3
    assert alive == [1, 0, 0, 0]  # the first run is compared with a replay


@pytest.mark.usefixtures("stream")
def test_what_nobody_writes_is_no_mistake_in_donated_memory() -> None:
    """Padding of a result in donated memory has what was there; fresh memory shows that it is none."""

    class Padded(_Wrong):
        donated = (0,)

        def replay(
            self, arguments: list[torch.Tensor], gives_away: bool, poison: int
        ) -> list[torch.Tensor]:
            result = arguments[0] + 1
            bits = 7 if gives_away else -1 if poison == verify.ONES else 0
            result.view(torch.int32)[0] = bits
            return [result]

    x = torch.ones(4)
    recording = Recording(graph := Padded(0.0, 0), graph, [])
    uncaptured = torch.tensor([5.0, 2.0, 2.0, 2.0])
    run = verify.Run(lambda args: [uncaptured.clone()], [x], recording, frozenset())
    assert run.closer_look([0]).failure == ""


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("output_bytes", [0, 1 << 40])
def test_a_result_that_differs_is_looked_at_closer_and_refused(output_bytes: int) -> None:
    assert _look(_Wrong(0, output_bytes), []).suspects == []
    wrong = _Wrong(1e-6, output_bytes)
    first = _look(wrong, [])
    assert (first.failure, first.suspects) == ("", [0])
    failure = _look(wrong, [0]).failure
    assert "1 of 1 results differ" in failure
    assert "result 0 by 0 elements and 4.8e-07 of the norm, another uncaptured run by 0" in failure


def test_inputs_that_nobody_sees_after_the_call_are_no_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiled code may leave anything in a saved tensor that it was given."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    graph = _Wrong(0, 0)
    recording = Recording(graph, graph, [], given_away=frozenset({0}))
    args = [torch.ones(1), torch.full((1,), 2.0)]
    run = verify.Run(lambda args: [], args, recording, mutated=frozenset({0, 1}))
    assert [int(result) for result in run._results([torch.zeros(1)], args)] == [0, 2]


@pytest.mark.usefixtures("stream")
def test_a_graph_that_writes_where_it_was_recorded_is_refused() -> None:
    pair = SimpleNamespace(poison=lambda: None, untouched=lambda: False)
    assert "memory it was recorded with" in _look(_Wrong(0, 0), [], pair).failure


@pytest.mark.usefixtures("stream")
def test_a_result_that_is_an_argument_is_not_compared_with_itself() -> None:
    class Identity(_Wrong):
        def replay(
            self, arguments: list[torch.Tensor], gives_away: bool, poison: int
        ) -> list[torch.Tensor]:
            return [arguments[0]]  # should have doubled it

    x = torch.ones(4)
    recording = Recording(graph := Identity(0, 0), graph, [], returned=frozenset({0}))
    result = verify.Run(lambda args: [args[0].mul_(2)], [x], recording, frozenset()).first_look()
    assert list(result.suspects) == [0]
    assert torch.equal(x, torch.full((4,), 2.0))


@pytest.mark.usefixtures("stream")
def test_writes_of_rehearsals_count_for_none_of_the_calls_tensors() -> None:
    x = torch.ones(4)
    recording = Recording(graph := _Wrong(0, 0), graph, [])
    run = verify.Run(lambda args: [args[0].mul_(1) + 1], [x], recording, frozenset())
    run._run([0])
    assert x._version == 0
