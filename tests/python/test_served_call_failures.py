"""What may go wrong in calls that the engine makes without Python, and where it must not make them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pygraph
from pygraph import runtime
from pygraph.callables import variant
from pygraph.callables.host.host_state import HostState

from . import frozen_world
from .graphed_programs import Training, adamw, assert_same, batches, replays
from .graphed_world import Replaying, partitions_of
from .interrupted import HandlerError, Moments, count, handling_signals
from .optimizer_loops import Loop, loops
from .test_served_calls import begun, pytestmark, served

__all__ = ["pytestmark"]


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    yield from partitions_of(lambda: frozen_world.install(monkeypatch))


@pytest.fixture
def plain_loops(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    yield from loops(monkeypatch)


def test_a_probe_that_raises_leaves_the_call_to_python(partitions: Any) -> None:
    view = memoryview(bytearray(8))
    graphed = begun(lambda x, which=False: x * (view[0] if which else 2), torch.ones(2))
    view.release()
    assert torch.equal(graphed(torch.ones(2)), torch.full((2,), 2.0))


def test_without_an_engine_the_function_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Any:
        raise ImportError("no engine")

    monkeypatch.setattr(runtime, "engine", none)
    assert torch.equal(pygraph.graph(lambda x: x * 2)(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize("is_served", [False, True])
def test_dynamo_traces_the_function(partitions: Any, is_served: bool) -> None:
    function = lambda x: x * 2  # noqa: E731
    graphed = begun(function, torch.ones(2)) if is_served else pygraph.graph(function)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: graphed(x) + 1, backend="eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    assert served(graphed) == 0


def test_no_rate_becomes_a_tensor_while_a_stream_captures(
    partitions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensor would have its value only after the program's graph has run."""
    training = Training(adamw)
    x, y = batches(1)[0]
    graphed = begun(training.step, x, y)
    training.optimizer.param_groups[0]["lr"] = 0.01
    before = replays(partitions)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    graphed(x, y)
    assert served(graphed) == 0 and replays(partitions) == before


class _Told(torch.Tensor):
    """Whose gradient is set by Python, which raises once if it is to: what so large an array holds is
    not compared."""

    is_to_raise = bytearray(1 << 17)

    @property
    def grad(self) -> Any:
        return torch.Tensor.grad.__get__(self)  # type: ignore[attr-defined]

    @grad.setter
    def grad(self, value: Any) -> None:
        if self.is_to_raise[0]:
            self.is_to_raise[0] = 0
            raise KeyboardInterrupt
        torch.Tensor.grad.__set__(self, value)  # type: ignore[attr-defined]


def test_an_interrupt_in_a_setter_leaves_all_gradients(frozen: Any) -> None:
    told = torch.ones(3).as_subclass(_Told).requires_grad_()  # type: ignore[no-untyped-call]
    others = [torch.ones(3, requires_grad=True) for _ in range(2)]

    def step(x: torch.Tensor) -> None:
        for tensor in (told, *others):
            tensor.grad = None
        (x * others[0]).sum().backward()
        ((x * told.as_subclass(torch.Tensor)).sum() + (x * others[1]).sum()).backward()

    graphed = begun(step, torch.ones(3))
    told.is_to_raise[0] = 1
    with pytest.raises(KeyboardInterrupt):
        graphed(torch.full((3,), 7.0))
    assert [tensor.grad.tolist() for tensor in (told, *others)] == [[7.0] * 3] * 3


@pytest.mark.parametrize("error", [MemoryError, HandlerError, KeyboardInterrupt])
def test_a_step_that_is_made_is_not_made_again(plain_loops: Any, error: type[BaseException]) -> None:
    """However the call ends, a plain loop's optimizer makes one step."""

    def at_its_last_step() -> Loop:
        loop = Loop(lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True))
        for x, y in batches(12):
            loop.step(x, y)
        for parameter in loop.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return loop

    loop = at_its_last_step()
    loop.optimizer.step()
    expected = loop.state()
    moments = count(lambda: at_its_last_step().optimizer.step)
    places = [i for i, (_, name, _) in enumerate(moments) if name == "Graphed.__call__"]
    assert places
    loop = at_its_last_step()
    with handling_signals(), pytest.raises(error):
        Moments(places[-1], error("injected")).run(loop.optimizer.step)
    assert_same(loop.state(), expected)


def test_a_reset_during_a_call_forgets_it(partitions: Any) -> None:
    graphed = begun(lambda x: x * 2, torch.ones(2))
    partition = partitions.all[0]
    replay = partition.callable

    def resetting(inputs: list[Any]) -> Any:
        graphed.reset()
        return replay(inputs)

    runtime.engine().forget_known_calls(graphed._served, None)
    partition.callable = resetting
    graphed(torch.ones(2))
    before = partition.replays
    graphed(torch.ones(2))
    assert served(graphed) == 0 and partition.replays == before


def test_what_is_known_is_of_one_state_of_the_host(
    partitions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may replace the state meanwhile. A watch refers to what its own state holds."""
    graphed = begun(lambda x: x * 2, torch.ones(2))
    [of] = graphed._variants.all()
    held = HostState.held.fget  # type: ignore[attr-defined]
    kinds = []
    add = runtime.engine().add_known_call

    def replaced(self: HostState) -> Any:
        of.accept(of.host.now())
        return held(self)

    engine = runtime.engine()
    monkeypatch.setattr(HostState, "held", property(replaced))
    monkeypatch.setattr(engine, "add_known_call", lambda *given: kinds.append(given[1]) or add(*given))
    before = of.host
    engine.forget_known_calls(graphed._served, None)
    graphed(torch.ones(2))
    assert of.host is not before
    assert kinds[0]["watch"] is before.watch and kinds[0]["held"][1][0] is before.found


def test_a_call_that_cannot_be_noted_returns_its_result(
    partitions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphed = begun(lambda x: x * 2, torch.ones(2))
    runtime.engine().forget_known_calls(graphed._served, None)

    def fails(*given: Any) -> Any:
        raise RuntimeError("no room")

    monkeypatch.setattr(variant.Variant, "known_call", fails)
    assert torch.equal(graphed(torch.ones(2)), torch.full((2,), 2.0))


def test_a_sparse_gradient_from_before_is_added_to(frozen: Any) -> None:
    parameter = torch.ones(3, requires_grad=True)
    graphed = begun(lambda x: (x * parameter).sum().backward(), torch.ones(3))
    parameter.grad = torch.ones(3).to_sparse()
    graphed(torch.ones(3))
    assert served(graphed) == 0 and torch.equal(parameter.grad, torch.full((3,), 2.0))
