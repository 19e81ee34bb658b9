"""Calls that the engine makes without Python, against the same calls made by Python and uncaptured."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import pygraph
from pygraph import runtime
from pygraph.callables import serving

from .graph_training import Training, adamw, batches, mlp, normed
from .support import captured

_CALLS = 40
_UNTIL_SERVED = 12  # observed, recorded, compared, tried; then a call by Python and its replay


def served(graphed: Any) -> int:
    """Calls since it was asked last."""
    return runtime.engine().take_served_count(graphed._served)


def leave_to_python(graphed: Any) -> None:
    never = ({}, "a name that is not there", 0)
    graphed._served = runtime.engine().served_calls(serving.inside, runtime._own, [never], None)


@pytest.mark.parametrize("model", [mlp, normed])
@pytest.mark.parametrize("zero_first", [False, True])
@pytest.mark.parametrize("moves", [False, True], ids=["", "the rate moves"])
def test_served_steps_are_those_of_python_and_uncaptured(
    model: Any, zero_first: bool, moves: bool
) -> None:
    programs = [Training(model, adamw, zero_first) for _ in range(3)]
    steps: list[Any] = [pygraph.graph(programs[0].step), pygraph.graph(programs[1].step)]
    leave_to_python(steps[1])
    steps.append(programs[2].step)
    losses: list[list[torch.Tensor]] = []
    for step, program in zip(steps, programs, strict=True):
        torch.manual_seed(2)
        found = []
        for i, (x, y) in enumerate(batches(_CALLS)):
            if moves:
                program.optimizer.param_groups[0]["lr"] = 1e-3 / (1 + i)
            found.append(step(x, y).detach().clone())
        losses.append(found)
    assert served(steps[0]) >= _CALLS - _UNTIL_SERVED, pygraph.stats()
    for others in losses[1:]:
        assert all(map(torch.equal, losses[0], others))
    for program in programs[1:]:
        assert all(map(torch.equal, programs[0].state(), program.state()))
    assert served(steps[1]) == 0
    versions = [[p._version for p in program.model.parameters()] for program in programs[:2]]
    assert versions[0] == versions[1]


def test_a_model_in_another_mode_has_its_own_calls() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)).cuda()
    graphed: Any = pygraph.graph(lambda x: model(x).sin())
    x = torch.randn(4, 8, device="cuda")
    with torch.no_grad():
        for i in range(6 * _CALLS):
            model.train(i % 6 < 3)
            state = torch.cuda.get_rng_state()
            found = graphed(x)
            torch.cuda.set_rng_state(state)
            assert torch.equal(found, model(x).sin()), i
    assert served(graphed) >= 2 * _CALLS, pygraph.stats()


def test_a_capture_of_the_programs_own_takes_the_kernels() -> None:
    weight = torch.randn(8, 8, device="cuda")
    graphed: Any = pygraph.graph(lambda x: torch.mm(x, weight).relu())
    x = torch.randn(8, 8, device="cuda")
    for _ in range(_UNTIL_SERVED):
        graphed(x)
    assert served(graphed) > 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = graphed(x)
    assert served(graphed) == 0
    x.normal_()
    graph.replay()
    assert torch.equal(result, torch.mm(x, weight).relu())
    assert torch.equal(graphed(x), result)


def test_threads_are_served_on_their_streams() -> None:
    weights = [torch.randn(64, 64, device="cuda") for _ in range(2)]
    graphed: Any = pygraph.graph(lambda x: torch.mm(torch.mm(x, weights[0]), weights[1]))
    failures: list[str] = []

    def work(number: int) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for i in range(10 * _CALLS):
                x = torch.full((64, 64), float(number + i % 7), device="cuda")
                expected = torch.mm(torch.mm(x, weights[0]), weights[1])
                if not torch.equal(graphed(x), expected):
                    failures.append(f"thread {number}, call {i}")

    x = torch.ones(64, 64, device="cuda")
    for _ in range(_UNTIL_SERVED):
        graphed(x)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert served(graphed) >= 20 * _CALLS, pygraph.stats()
    assert len(captured()) == 1


def test_results_keep_the_memory_of_their_calls_alone() -> None:
    weight = torch.randn(256, 256, device="cuda")
    graphed: Any = pygraph.graph(lambda x: torch.mm(x, weight))
    x = torch.randn(256, 256, device="cuda")
    for _ in range(_UNTIL_SERVED):
        graphed(x)
    first, second = graphed(x), graphed(2 * x)
    assert torch.equal(second, torch.mm(2 * x, weight)) and torch.equal(first, torch.mm(x, weight))
    del first, second
    before = torch.cuda.memory_allocated()
    for _ in range(_CALLS):
        graphed(x)
    assert torch.cuda.memory_allocated() == before
    assert served(graphed) >= _CALLS
