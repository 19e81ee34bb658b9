"""Gradients that a graphed step leaves, and drops in the next call: replays overwrite those that nobody
else holds, and only those (bindings/replay/left_gradients.h)."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph

from . import faults
from .graph_training import Training, adamw, batches
from .support import assert_used, captured

_WARM_UP = 12
# Before PyGraph asks for the driver; not without a GPU, where the same process runs other tests.
_CAN_FAIL = torch.cuda.is_available() and faults.install()

Between = Callable[[Training, int], Any]


def _model() -> torch.nn.Module:
    """It draws no random numbers: the two trainings take turns."""
    sizes = (32, 48, 48, 48, 10)
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))


def _pair() -> tuple[Training, Training]:
    """The same training: as it is, and graphed."""
    plain, graphed = (Training(_model, adamw, zero_first=True) for _ in range(2))
    graphed.step = pygraph.graph(graphed.step)
    return plain, graphed


def _parameters(training: Training) -> list[torch.nn.Parameter]:
    return list(training.model.parameters())


def _allocations() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def _replays() -> int:
    return sum(row.replays for row in pygraph.stats())


def _allocations_of(training: Training, steps: int) -> float:
    data = batches(steps)
    before = _allocations()
    for x, y in data:
        training.step(x, y)
    return (_allocations() - before) / steps


def test_a_replay_allocates_no_gradients() -> None:
    _, graphed = _pair()
    for x, y in batches(_WARM_UP):
        graphed.step(x, y)
    _allocations_of(graphed, 3)  # the gradients of the last uncaptured call are gone
    assert _allocations_of(graphed, 10) <= 2  # the loss; not eight gradients
    assert captured()[0].outputs > len(_parameters(graphed))


def test_gradients_are_fresh_memory_where_the_option_says_so() -> None:
    graphed = Training(_model, adamw, zero_first=True)
    graphed.step = pygraph.graph(graphed.step, reuse_gradients=False)
    for x, y in batches(_WARM_UP):
        graphed.step(x, y)
    assert _allocations_of(graphed, 10) >= len(_parameters(graphed))


def _keeps_tensors(training: Training, i: int) -> Any:
    return [p.grad for p in _parameters(training)] if i % 2 else None


def _keeps_one_view(training: Training, i: int) -> Any:
    gradient = _parameters(training)[i % 4].grad
    assert gradient is not None
    return gradient.view(-1)[1:2]


def _keeps_memory(training: Training, i: int) -> Any:
    gradient = _parameters(training)[0].grad
    assert gradient is not None
    return torch.empty(0, device="cuda").set_(gradient.untyped_storage()) if i % 3 == 0 else None


def _keeps_detached(training: Training, i: int) -> Any:
    return [p.grad.detach() for p in _parameters(training)[:2] if p.grad is not None]


@pytest.mark.parametrize("keep", [_keeps_tensors, _keeps_one_view, _keeps_memory, _keeps_detached])
def test_what_the_program_keeps_is_never_overwritten(keep: Between) -> None:
    plain, graphed = _pair()
    kept: list[list[Any]] = [[], []]
    for i, (x, y) in enumerate(batches(40)):
        for training, of in zip((plain, graphed), kept, strict=True):
            training.step(x, y)
            found = keep(training, i) if i >= _WARM_UP and i % 4 else None
            of.append([found] if isinstance(found, torch.Tensor) else found or [])
    torch.cuda.synchronize()
    for of_plain, of_graphed in zip(*kept, strict=True):
        for a, b in zip(of_plain, of_graphed, strict=True):
            assert torch.equal(a, b)
    assert_used()


def _replaces(training: Training, i: int) -> None:
    for p in _parameters(training)[i % 3 :: 3]:
        assert p.grad is not None
        p.grad = p.grad.clone()


def _drops(training: Training, i: int) -> None:
    if i % 5 == 0:
        training.optimizer.zero_grad()


def _changes(training: Training, i: int) -> None:
    for p in _parameters(training)[::2]:
        assert p.grad is not None
        p.grad.mul_(2)


def _resizes_memory(training: Training, i: int) -> None:
    gradient = _parameters(training)[0].grad
    assert gradient is not None
    memory = gradient.untyped_storage()
    size = memory.nbytes()
    memory.resize_(0)
    memory.resize_(size)


def _shares(training: Training, i: int) -> None:
    first, *_, last = (p for p in _parameters(training) if p.dim() == 1)
    if first.shape == last.shape:
        last.grad = first.grad


def _copies_data(training: Training, i: int) -> None:
    for p in _parameters(training):
        assert p.grad is not None
        p.grad.data = p.grad.data.clone()


@pytest.mark.parametrize(
    "between", [_replaces, _drops, _changes, _resizes_memory, _shares, _copies_data]
)
def test_what_happens_to_gradients_between_steps(between: Between) -> None:
    plain, graphed = _pair()
    for i, (x, y) in enumerate(batches(50)):
        losses = []
        for training in (plain, graphed):
            losses.append(training.step(x, y))
            if i >= _WARM_UP:
                between(training, i)
        assert torch.equal(*losses), i
        if between is not _resizes_memory:  # whose content is nobody's
            for p, q in zip(_parameters(plain), _parameters(graphed), strict=True):
                assert (p.grad is None) == (q.grad is None)
                assert p.grad is None or q.grad is None or torch.equal(p.grad, q.grad), i


def test_gradients_that_are_never_looked_at_are_right_at_the_end() -> None:
    plain, graphed = _pair()
    for x, y in batches(60):
        plain.step(x, y)
        graphed.step(x, y)
    for a, b in zip(plain.state(), graphed.state(), strict=True):
        assert torch.equal(a, b)
    assert_used()


def test_steps_on_other_streams() -> None:
    """A stream does not overwrite what another one may still read."""
    plain, graphed = _pair()
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i, (x, y) in enumerate(batches(60)):
        expected = plain.step(x, y)
        stream = streams[i // 7 % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            before = _allocations()
            kept.append((expected, graphed.step(x, y)))
            # A correct program cannot tell by its results, because it waits; but by what is allocated.
            if i >= 28 and i % 7 == 0:
                assert _allocations() - before >= len(_parameters(graphed)), i
        torch.cuda.current_stream().wait_stream(stream)
        for other in streams:
            other.wait_stream(stream)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in kept)
    for a, b in zip(plain.state(), graphed.state(), strict=True):
        assert torch.equal(a, b)


def test_one_shape_after_the_other() -> None:
    """Two graphs, whose gradients have the same sizes."""
    plain, graphed = _pair()
    for i, (x, y) in enumerate(batches(80)):
        rows = x.shape[0] if i % 3 else x.shape[0] // 2
        assert torch.equal(plain.step(x[:rows], y[:rows]), graphed.step(x[:rows], y[:rows])), i
    for a, b in zip(plain.state(), graphed.state(), strict=True):
        assert torch.equal(a, b)


def test_old_gradients_are_released() -> None:
    _, graphed = _pair()
    for x, y in batches(_WARM_UP):
        graphed.step(x, y)
    held = [weakref.ref(p.grad) for p in _parameters(graphed) if p.grad is not None]
    for x, y in batches(3):
        graphed.step(x, y)
    assert held and all(reference() is None for reference in held)


def test_a_backward_elsewhere_adds_to_gradients() -> None:
    """It makes no object of Python's of them, and counts their versions."""
    plain, graphed = _pair()
    data = batches(41)
    for i, (x, y) in enumerate(data):
        for training in (plain, graphed):
            training.step(x, y)
            if i >= _WARM_UP and i % 3 == 0:
                training.model(x).square().sum().backward()
    for a, b in zip(plain.state(), graphed.state(), strict=True):
        assert torch.equal(a, b)
    graphed.step(*data[0])  # no more looked at
    graphed.step(*data[1])
    graphed.model(data[1][0]).square().sum().backward()
    before = _replays()
    graphed.step(*data[2])
    assert _replays() == before + 1
    assert all(p.grad is not None and p.grad._version == 0 for p in _parameters(graphed))


@pytest.mark.skipif(not _CAN_FAIL, reason="the driver cannot be made to fail here")
@pytest.mark.parametrize("name", ["cuGraphLaunch", "cuGraphExecKernelNodeSetParams"])
def test_gradients_are_put_back_where_the_driver_fails(name: str) -> None:
    """The uncaptured run, which comes after, finds them. Nothing else here looks at them: those that
    Python has seen are not taken."""
    plain, graphed = (Training(_model, adamw, zero_first=True) for _ in range(2))
    parameters, step = _parameters(graphed), graphed.step

    @pygraph.graph
    def counted(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
        found = sum(p.grad is not None for p in parameters)
        return step(x, y), found

    for i, (x, y) in enumerate(batches(40)):
        failed, before, replays = 0, _allocations(), 0
        if i == 25:
            failed, replays = faults.failures(name), _replays()
            faults.inject(name, faults.INVALID_VALUE)
        loss, found = counted(x, y)
        if i == 24:
            assert _allocations() - before <= 2  # the gradients were taken
        if i == 25:
            assert faults.failures(name) == failed + 1
            assert _replays() == replays
        assert found == (len(parameters) if i else 0), i
        assert torch.equal(plain.step(x, y), loss), i
    faults.clear()
    for a, b in zip(plain.state(), graphed.state(), strict=True):
        assert torch.equal(a, b)


def test_another_thread_that_reads_gradients_sees_whole_ones() -> None:
    """It has what it has taken hold of, or nothing: as with `zero_grad` in an uncaptured step."""
    _, graphed = _pair()
    data = batches(_WARM_UP)
    for x, y in data:
        graphed.step(x, y)
    stops = threading.Event()
    seen: list[bool] = []
    parameter = _parameters(graphed)[0]

    def read() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            while not stops.is_set():
                gradient = parameter.grad
                if gradient is None:
                    continue
                torch.cuda.synchronize()
                first = gradient.clone()
                torch.cuda.synchronize()
                seen.append(torch.equal(first, gradient))

    reader = threading.Thread(target=read)
    reader.start()
    for x, y in batches(300):
        graphed.step(x, y)
    stops.set()
    reader.join()
    assert seen and all(seen)
