"""What code gets to know that asks, while it is recorded, whether its stream captures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.cuda import graphs, is_current_stream_capturing

import pygraph
from pygraph import runtime
from pygraph.callables import serving
from pygraph.callables.host.host_state import HostState
from pygraph.partition.recording_policy import MOST_IN_NEW_THREADS, RecordingPolicy
from pygraph.partition.signature import State
from pygraph.record import stream_capture
from pygraph.record.hidden_capture import HiddenCapture

from .contexts import during
from .graphed_world import Replaying
from .recorded_world import Program, World

_ASKS = "_cuda_isCurrentStreamCapturing"
Ask = Callable[[], bool]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stream captures."""
    monkeypatch.setattr(graphs, _ASKS, lambda: True)


class _Asking(Program):
    """Its function asks. answers: that it got in captures. fails: by answer, what it raises there."""

    def __init__(
        self,
        world: World,
        ask: Ask = is_current_stream_capturing,
        fails: dict[bool, Exception] | None = None,
    ) -> None:
        super().__init__(world, {})
        self._ask = ask
        self._fails = fails or {}
        self.answers: list[bool] = []

    def _run(self, args: list[Any]) -> list[torch.Tensor]:
        answer = self._ask()
        if self._world.gpu.capture is not None:
            self.answers.append(answer)
            if answer in self._fails:
                raise self._fails[answer]
        else:
            assert not answer
        return super()._run(args)

    def call_twice(self) -> None:
        """The second call is recorded."""
        for number in range(2):
            assert torch.equal(self.call(number), self.expected(number))

    def call_in_new_thread(self, number: int) -> None:
        thread = threading.Thread(target=self.call, args=(number,))
        thread.start()
        thread.join()


def _asked_from(module: str) -> Ask:
    """Asks in the code of a module of that name."""
    scope: dict[str, Any] = {"__name__": module, "torch": torch}
    exec("def ask(): return torch.cuda.is_current_stream_capturing()", scope)
    ask: Ask = scope["ask"]
    return ask


def _in_another_thread(ask: Ask) -> bool:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()
    thread.join()
    return answers[0]


_SYNC = RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("module", ["__main__", "transformers.utils", "torchvision.ops", "tritonic"])
def test_the_program_is_told_no_and_was_noticed(captures: None, module: str) -> None:
    ask, hidden = _asked_from(module), HiddenCapture()
    assert ask()
    with during(hidden.begin):
        assert not hidden.was_asked
        assert not ask()
        assert hidden.was_asked
    assert ask()


@pytest.mark.parametrize("module", ["torch.optim.adam", "torch", "triton.runtime", "pygraph.runtime"])
def test_who_captures_is_told_the_truth(captures: None, module: str) -> None:
    ask, hidden = _asked_from(module), HiddenCapture()
    with during(hidden.begin):
        assert ask()
    assert not hidden.was_asked


def test_pytorchs_and_our_own_code_gets_the_truth(
    captures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(runtime, "unavailable_reason", lambda: None)
    hidden = HiddenCapture()
    with during(hidden.begin):
        assert runtime._is_part_of_a_capture()
        assert not serving.may_be_served()
    assert not hidden.was_asked


def test_other_threads_and_streams_that_do_not_capture_get_the_truth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    does_capture = True
    monkeypatch.setattr(graphs, _ASKS, lambda: does_capture)
    hidden = HiddenCapture()
    with during(hidden.begin):
        assert _in_another_thread(is_current_stream_capturing)
        does_capture = False
        assert not _in_another_thread(is_current_stream_capturing)
        assert not is_current_stream_capturing()
    assert not hidden.was_asked


def test_it_does_not_matter_by_which_name_the_program_asks(captures: None) -> None:
    with during(HiddenCapture().begin):
        kept = graphs._cuda_isCurrentStreamCapturing
        assert not kept()
        assert not torch.cuda.graphs.is_current_stream_capturing()
    assert kept()  # nothing is hidden any more


@pytest.mark.parametrize("theirs", [None, type("Dummy", (), {})])
def test_a_pytorch_that_asks_in_another_way_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, theirs: Any
) -> None:
    monkeypatch.setattr(graphs, _ASKS, theirs)
    with during(HiddenCapture().begin):
        assert vars(graphs)[_ASKS] is theirs


@pytest.mark.filterwarnings("error")  # of Dynamo, about our code
def test_a_compiled_program_that_asks_is_told_no_and_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch 2.15 raises where something is to be compiled in a capture."""
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y + 1 if is_current_stream_capturing() else y - 1

    does_capture = False
    monkeypatch.setattr(graphs, _ASKS, lambda: does_capture)
    torch._dynamo.reset()
    function, hidden = torch.compile(step, backend=backend), HiddenCapture()
    expected = function(torch.ones(2))
    count, frames = len(compiled), dict(torch._dynamo.utils.counters["frames"])
    does_capture = True
    with during(hidden.begin):
        assert torch.equal(function(torch.ones(2)), expected)
    assert hidden.was_asked
    assert len(compiled) == count
    assert dict(torch._dynamo.utils.counters["frames"]) == frames


def test_what_somebody_else_puts_there_meanwhile_stays(captures: None) -> None:
    def theirs() -> bool:
        return True

    with during(HiddenCapture().begin):
        setattr(graphs, _ASKS, theirs)
    assert vars(graphs)[_ASKS] is theirs


def test_it_is_no_change_of_the_programs_state(captures: None) -> None:
    def step() -> bool:
        return is_current_stream_capturing() or torch.cuda.graphs.is_current_stream_capturing()

    state = HostState({"step": step})
    with during(HiddenCapture().begin):
        assert state.holds()
        assert not state.changes(state.now())


@pytest.mark.parametrize("ask", [is_current_stream_capturing, _asked_from("transformers.utils")])
def test_the_program_is_recorded_as_it_runs_uncaptured(world: World, ask: Ask) -> None:
    program = _Asking(world, ask)
    program.call_twice()
    assert program.answers == [False, False]  # in both recordings
    assert program.entry.graph is not None


def test_what_cannot_be_captured_then_is_tried_once_more_with_the_truth(world: World) -> None:
    program = _Asking(world, fails={False: _SYNC})
    program.call_twice()
    assert program.answers == [False, True, True]
    assert program.entry.graph is not None


def test_the_reason_is_that_of_the_last_recording(world: World) -> None:
    program = _Asking(world, fails={False: _SYNC, True: RuntimeError("not in a graph")})
    program.call_twice()
    assert program.answers == [False, True]
    assert program.entry.state is State.REFUSED
    assert program.entry.reason == "RuntimeError: not in a graph"


def test_where_nobody_asks_nothing_is_tried_again(world: World) -> None:
    program = _Asking(world, lambda: False, fails={False: _SYNC})
    program.call_twice()
    assert program.answers == [False]
    assert program.entry.reason == f"RuntimeError: {_SYNC}"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), runtime.OthersDraw("no")])
def test_what_a_later_call_may_record_is_not_tried_with_the_truth(
    world: World, error: Exception
) -> None:
    program = _Asking(world, fails={False: error})
    program.call_twice()
    assert program.answers == [False]


def test_a_thread_that_has_not_run_the_program_does_not_try_with_the_truth(world: World) -> None:
    """A library may lack a handle for the thread, which the first try perhaps has made."""
    fails: dict[bool, Exception] = {False: RuntimeError("no handle")}
    program = _Asking(world, fails=fails)
    program.call(0)
    program.call_in_new_thread(1)
    assert program.answers == [False]
    assert program.entry.state is State.UNCAPTURED
    fails.clear()
    assert torch.equal(program.call(2), program.expected(2))
    assert program.answers == [False] * 3
    assert program.entry.graph is not None


def test_of_new_threads_the_last_one_tries_with_the_truth(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All calls of a program may be in new threads."""
    monkeypatch.setattr(stream_capture, "make_handles", lambda: None)
    program = _Asking(world, fails={False: _SYNC})
    monkeypatch.setattr(RecordingPolicy, "seconds_to_wait", lambda *of, **how: 0.0)
    for number in range(MOST_IN_NEW_THREADS + 1):  # the first one is not recorded
        program.call_in_new_thread(number)
    assert program.answers == [False] * MOST_IN_NEW_THREADS + [True, True]
    assert program.entry.graph is not None


def test_after_all_ways_everything_is_as_before(world: World) -> None:
    before = world.gpu.surroundings()
    for fails in ({}, {False: _SYNC}, {False: _SYNC, True: _SYNC}):
        world.program()  # begins anew
        _Asking(world, fails=fails).call_twice()
        assert world.gpu.surroundings() == before


def test_all_recordings_of_callables_hide_their_captures(
    gradients: type[Replaying],
) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    step = pygraph.graph(lambda x: x * weight)
    for _ in range(6):
        step(torch.ones(3)).sum().backward()
    assert {partition.info.kind for partition in gradients.all} == {"forward", "backward"}
    assert all(partition.info.runs_program for partition in gradients.all)
