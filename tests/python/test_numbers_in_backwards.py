"""Learning rates and momentum that a differentiable callable reads, in its forward or its backward, on
the CPU. The graph that autograd makes in a recording may keep what it has read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import pygraph
from pygraph.callables import rate_probe
from pygraph.callables.told_number import AbsentNumber

from . import gradient_world
from .graphed_programs import assert_same, batches, replays
from .graphed_world import Replaying, partitions_of

_STEPS = 30


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    monkeypatch.setattr(rate_probe, "_known", {})
    yield from partitions_of(lambda: gradient_world.install(monkeypatch))


class Scaled(torch.autograd.Function):
    """Multiplies the gradient by a number, or by what a function returns in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient * (ctx.scale() if callable(ctx.scale) else ctx.scale), None


def unused(y: torch.Tensor, read: Any) -> torch.Tensor:
    return y


def by_an_operator(y: torch.Tensor, read: Any) -> torch.Tensor:
    return y * read()  # type: ignore[no-any-return]


def kept_for_the_backward(y: torch.Tensor, read: Any) -> torch.Tensor:
    return Scaled.apply(y, read())  # type: ignore[no-any-return]


def read_in_the_backward(y: torch.Tensor, read: Any) -> torch.Tensor:
    return Scaled.apply(y, read)  # type: ignore[no-any-return]


def reader(held: Any, key: str) -> Callable[[], Any]:
    for _ in range(6):  # further away than the optimizer, so that paths name the optimizer
        held = [held]
    return lambda: held[0][0][0][0][0][0][key]


def set_in_the_backward(y: torch.Tensor, read: Any) -> torch.Tensor:
    def set_to_a_number() -> float:
        read.__closure__[0].cell_contents[0][0][0][0][0][0]["lr"] = 0.25
        return 1.0

    return Scaled.apply(y, set_to_a_number)  # type: ignore[no-any-return]


def train(way: Any, key: str, optimizer: Any, moves: range, graphs: bool) -> list[torch.Tensor]:
    """moves: steps in which the number moves."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    of = optimizer(model.parameters())
    # Numbers of a group that the program holds are not followed.
    read = None if way is unused else reader(of.param_groups[0], key)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        assert of is not None
        result: torch.Tensor = way(model(x), read).square().sum()
        return result

    run = pygraph.graph(loss_of) if graphs else loss_of
    found = []
    for i, (x, _) in enumerate(batches(_STEPS)):
        if i < 4 or i in moves:
            of.param_groups[0][key] = 0.5 + 0.01 * i
        loss = run(x)
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]
        of.step()
        of.zero_grad()
    return [*found, *(p.detach() for p in model.parameters())]


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.5, fused=True)


def adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=0.05, fused=True)


_MOVES = [range(_STEPS), range(20, _STEPS)]


@pytest.mark.parametrize("moves", _MOVES)
@pytest.mark.parametrize("way", [unused, by_an_operator, kept_for_the_backward, read_in_the_backward])
def test_a_gradient_has_the_momentum_of_its_call(partitions: Any, way: Any, moves: range) -> None:
    assert_same(train(way, "momentum", sgd, moves, True), train(way, "momentum", sgd, moves, False))
    assert way is not unused or replays(partitions) > 20, pygraph.stats()


@pytest.mark.parametrize("moves", _MOVES)
@pytest.mark.parametrize(
    "way", [unused, kept_for_the_backward, read_in_the_backward, set_in_the_backward]
)
def test_a_gradient_has_the_rate_of_its_call(partitions: Any, way: Any, moves: range) -> None:
    assert_same(train(way, "lr", adam, moves, True), train(way, "lr", adam, moves, False))
    assert way is not unused or replays(partitions) > 20, pygraph.stats()


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x * 2,
        lambda x: 2 - x,
        lambda x: x == 0,
        lambda x: isinstance(x, float),
        lambda x: f"{x}",
        lambda x: x.real,
        lambda x: float(x),
        lambda x: {x: 1},
    ],
)
def test_one_that_is_absent_tells(use: Any) -> None:
    told: list[bool] = []
    absent = AbsentNumber(lambda: told.append(True))
    with contextlib.suppress(TypeError, AttributeError):
        use(absent)
    assert told
