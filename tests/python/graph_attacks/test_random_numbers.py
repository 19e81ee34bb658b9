"""Random states that the program sets."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch

import pygraph

from .attacked import Plain, X, assert_follows, replays


def test_a_random_state_that_is_put_back(partitions: Any) -> None:
    def f(x: Any) -> Any:
        state = random.getstate()
        random.seed(3)
        k = random.random()
        random.setstate(state)
        return x * k

    graphed = pygraph.graph(f)
    for _ in range(8):
        assert torch.equal(graphed(X), f(X))


def test_initial_seed(partitions: Any) -> None:
    torch.manual_seed(1)
    f = lambda x: x * (torch.initial_seed() % 7)  # noqa: E731
    assert_follows(partitions, f, lambda: torch.manual_seed(2))


def test_random_seed_by_the_program(partitions: Any) -> None:
    """Draws from a state that the call leaves as it found it: frozen when the program seeds."""

    def f(x: Any) -> Any:
        state = random.getstate()
        k = random.random()
        random.setstate(state)
        return x * k

    random.seed(0)
    graphed = pygraph.graph(f)
    for _ in range(8):
        assert torch.equal(graphed(X), f(X))
    random.seed(1)
    assert torch.equal(graphed(X), f(X))


_GENERATORS: dict[str, tuple[Any, Any]] = {
    "PyTorch": (torch.manual_seed, lambda: torch.rand(1).item()),
    "Python": (random.seed, random.random),
    "NumPy": (numpy.random.seed, numpy.random.random),
}
_by_generator = pytest.mark.parametrize(("seed", "draw"), _GENERATORS.values(), ids=_GENERATORS)


def _drawn_after(call: Any, draw: Any) -> tuple[Any, Any]:
    draw()
    call()
    return draw(), draw()


@_by_generator
def test_a_seed_that_a_step_sets(partitions: Any, seed: Any, draw: Any) -> None:
    """Observed calls after the first one begin at the state that the step leaves."""

    def f(x: Any) -> Any:
        seed(3)
        return x * 2

    graphed = pygraph.graph(f)
    for _ in range(9):
        graphed(X)
    assert _drawn_after(lambda: graphed(X), draw) == _drawn_after(lambda: f(X), draw)


_STATES: dict[str, tuple[Any, Any, Any]] = {
    "PyTorch": (torch.get_rng_state, lambda state: torch.set_rng_state(state), torch.rand),
    "Python": (random.getstate, lambda state: random.setstate(state), lambda _: [random.random()]),
    "NumPy": (
        numpy.random.get_state,
        lambda state: getattr(numpy.random, "set_state")(state),  # noqa: B009
        numpy.random.rand,
    ),
}


@pytest.mark.parametrize(("get", "put", "draw"), _STATES.values(), ids=_STATES)
def test_a_state_that_a_step_sets(partitions: Any, get: Any, put: Any, draw: Any) -> None:
    state = get()

    def f(x: Any) -> Any:
        put(state)
        return x * float(draw(1)[0])

    graphed = pygraph.graph(f)
    for _ in range(9):
        assert torch.equal(graphed(X), f(X))
    number = lambda: float(draw(1)[0])  # noqa: E731
    assert _drawn_after(lambda: graphed(X), number) == _drawn_after(lambda: f(X), number)


@_by_generator
def test_a_seed_that_a_backward_sets(gradients: Any, seed: Any, draw: Any) -> None:
    w = torch.ones(4, requires_grad=True)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seed(3)
            return gradient * 2

    f = lambda x: Doubled.apply(x * w).sum()  # noqa: E731

    def call(of: Any) -> None:
        of(X).backward()
        w.grad = None

    graphed = pygraph.graph(f)
    for _ in range(12):
        call(graphed)
    assert _drawn_after(lambda: call(graphed), draw) == _drawn_after(lambda: call(f), draw)


def test_a_seed_that_is_put_back_costs_no_graph(partitions: Any) -> None:
    def f(x: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return x * torch.rand(1).item()

    graphed = pygraph.graph(f)
    for _ in range(12):
        torch.rand(1)
        assert torch.equal(graphed(X), f(X))
    assert replays(partitions) > 0


def test_reading_the_seed_costs_no_graph(partitions: Any) -> None:
    torch.manual_seed(1)
    f = lambda x: x * (torch.initial_seed() % 7)  # noqa: E731
    graphed = pygraph.graph(f)
    for _ in range(12):
        assert torch.equal(graphed(X), f(X))
    assert replays(partitions) > 0


def test_a_callable_that_may_seed_leaves_the_states_of_its_calls(partitions: Any) -> None:
    """Its rehearsals begin at others, and what the program draws in between is its own."""
    settings = Plain(is_new=False)

    def f(x: Any) -> Any:
        if settings.is_new:
            torch.manual_seed(3)
            numpy.random.seed(3)
        return x * 2

    def drawn(of: Any) -> list[Any]:
        torch.manual_seed(7)
        random.seed(7)
        numpy.random.seed(7)
        numbers: list[Any] = []
        for _ in range(12):
            of(X)
            numbers += [torch.rand(1).item(), random.random(), numpy.random.random()]
        return numbers

    assert drawn(pygraph.graph(f)) == drawn(f)
    assert replays(partitions) > 0
