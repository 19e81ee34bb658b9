"""Random states that the program sets."""

from __future__ import annotations

from typing import Any

import torch

import pygraph

from .attacked import X, assert_follows, open_to_this


def test_a_random_state_that_is_put_back(partitions: Any) -> None:
    import random

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
    import random

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


@open_to_this
def test_a_seed_that_a_step_sets(partitions: Any) -> None:
    """Observed calls after the first one begin at the state that the step leaves."""

    def f(x: Any) -> Any:
        torch.manual_seed(3)
        return x * 2

    graphed = pygraph.graph(f)
    for _ in range(9):
        graphed(X)
    torch.rand(1)
    graphed(X)
    drawn = torch.rand(1)
    f(X)
    assert torch.equal(drawn, torch.rand(1))
