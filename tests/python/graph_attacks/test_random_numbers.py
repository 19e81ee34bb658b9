"""Random states that the program sets."""

from __future__ import annotations

import functools
import random
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

import pygraph
from pygraph.callables.host.random_states import random_state

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


_reset = numpy.random.seed
_again = functools.partial(numpy.random.seed, 3)


class _Resets:
    reset = staticmethod(numpy.random.seed)
    again = functools.partialmethod(lambda self, seed: seed(3), numpy.random.seed)

    def by_a_keyword(self, x: Any) -> Any:
        _set_determinism(seed=3)
        return x * 2


def _set_determinism(**numbers: int) -> None:
    torch.manual_seed(*numbers.values())


def _default(x: Any, reset: Any = numpy.random.seed) -> Any:
    reset(3)
    return x * 2


def _by_text(x: Any) -> Any:
    for name in ("manual_seed",):
        getattr(torch, name)(3)
    return x * 2


_WAYS: dict[str, Any] = {
    "alias": lambda x: (_reset(3), x * 2)[1],
    "partial": lambda x: (_again(), x * 2)[1],
    "static method": lambda x: (_Resets().reset(3), x * 2)[1],
    "partial method": lambda x: (_Resets().again(), x * 2)[1],
    "keyword": _Resets().by_a_keyword,
    "default": _default,
    "text": _by_text,
    "bit generator": lambda x: (
        numpy.random.set_bit_generator(numpy.random.MT19937(3)),
        x * 2,
    )[1],
    "its own seed": lambda x: (torch.manual_seed(torch.initial_seed()), x * 2)[1],
}


@pytest.fixture
def bit_generator() -> Iterator[Any]:
    own = numpy.random.get_bit_generator()
    yield own
    numpy.random.set_bit_generator(own)


@pytest.mark.parametrize("f", _WAYS.values(), ids=_WAYS)
def test_other_ways_to_seed(gradients: Any, f: Any, bit_generator: Any) -> None:
    graphed = pygraph.graph(f)
    for _ in range(20):
        graphed(X)

    def numbers(call: Any) -> tuple[float, float]:
        torch.rand(1)
        numpy.random.random()
        call(X)
        return torch.rand(1).item(), numpy.random.random()

    assert any(ours == own for ours, own in zip(numbers(graphed), numbers(f), strict=True))


def test_a_seed_that_is_read_is_the_programs(gradients: Any) -> None:
    """Its first recording begins at other states. What it reads there is in no graph."""

    def f(x: Any) -> Any:
        "Scales by the seed."
        return x * (torch.initial_seed() % 7)

    torch.manual_seed(1)
    graphed = pygraph.graph(f)
    for _ in range(12):
        graphed(torch.zeros(4))
    assert torch.equal(graphed(X), X)
    assert replays(gradients) > 0


def test_another_bit_generator_of_numpy(gradients: Any, bit_generator: Any) -> None:
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    settings = Plain(seed=2)
    graphed = pygraph.graph(lambda x: x * settings.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(12):
            assert torch.equal(graphed(X), X * 2)
    assert replays(gradients) > 0


def test_numbers_that_another_bit_generator_draws(partitions: Any, bit_generator: Any) -> None:
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    f = lambda x: (numpy.random.random(), x * 2)[1]  # noqa: E731

    def drawn_after(function: Any) -> float:
        numpy.random.get_bit_generator().state = numpy.random.PCG64(5).state
        for _ in range(9):
            function(X)
        return numpy.random.random()

    assert drawn_after(pygraph.graph(f)) == drawn_after(f)


def test_numpy_is_being_imported(partitions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy.random", types.ModuleType("numpy.random"))
    graphed = pygraph.graph(lambda x: x * 2)
    for _ in range(6):
        assert torch.equal(graphed(X), X * 2)


def test_an_exception_while_states_are_moved(gradients: Any) -> None:
    """In a recording alone: observed calls pass."""

    def f(x: Any) -> Any:
        "Has no seed."
        if torch.initial_seed() != 5:
            raise ValueError("moved")
        return x * 2

    torch.manual_seed(5)
    before = random_state()
    graphed = pygraph.graph(f)
    for _ in range(6):
        assert torch.equal(graphed(X), X * 2)
    assert random_state() == before


def test_numbers_of_numpy_that_are_drawn_and_put_back(partitions: Any) -> None:

    def f(x: Any) -> Any:
        state = numpy.random.get_state()
        k = numpy.random.random()
        numpy.random.set_state(state)
        return x * k

    numpy.random.seed(0)
    graphed = pygraph.graph(f)
    for _ in range(12):
        graphed(torch.zeros(4))
    numpy.random.random()
    assert torch.equal(graphed(X), f(X))
