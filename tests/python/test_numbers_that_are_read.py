"""Numbers of fused optimizers that Python reads by ways that do not name ``param_groups``, on the CPU.

What reads them here chooses as the recording's numbers do until the momentum has grown.
"""

from __future__ import annotations

import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pygraph
from pygraph.callables import rate_probe

from . import frozen_world
from .graphed_programs import Training, assert_same, batches, replays, training
from .graphed_world import Replaying, partitions_of

_LIBRARY = """
def momentum_of(optimizer):
    return _inner(optimizer)

def _inner(optimizer):
    return optimizer.param_groups[0]["momentum"]

class Wrapped:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def momentum(self):
        return self.optimizer.param_groups[0]["momentum"]
"""


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    monkeypatch.setattr(rate_probe, "_known", {})
    yield from partitions_of(lambda: frozen_world.install(monkeypatch))


def library() -> Any:
    """A module of an installed package."""
    file = str(Path(sysconfig.get_paths()["purelib"]) / "not_there.py")
    module = types.ModuleType("not_there")
    module.__file__ = file
    exec(compile(_LIBRARY, file, "exec"), vars(module))
    return module


def kept_deep(at: Training) -> Callable[[], float]:
    held: Any = at.optimizer.param_groups[0]
    for _ in range(6):
        held = [held]

    def read() -> float:
        return float(held[0][0][0][0][0][0]["momentum"])

    return read


def by_state_dict(at: Training) -> Callable[[], float]:
    return lambda: list(at.optimizer.state_dict().values())[1][0]["momentum"]  # type: ignore[no-any-return]


def by_attributes(at: Training) -> Callable[[], float]:
    return lambda: next(v for k, v in vars(at.optimizer).items() if k[:5] == "param")[0]["momentum"]  # type: ignore[no-any-return]


def by_a_computed_name(at: Training) -> Callable[[], float]:
    return lambda: getattr(at.optimizer, "_".join(("param", "groups")))[0]["momentum"]  # type: ignore[no-any-return]


def by_a_library(at: Training) -> Callable[[], float]:
    module = library()
    return lambda: module.momentum_of(at.optimizer)  # type: ignore[no-any-return]


def by_a_wrapper(at: Training) -> Callable[[], float]:
    wrapped = library().Wrapped(at.optimizer)
    return lambda: wrapped.momentum()  # type: ignore[no-any-return]


_WAYS = [kept_deep, by_state_dict, by_attributes, by_a_computed_name, by_a_library, by_a_wrapper]


def train(way: Any, choose: Callable[[float], float], graphs: bool) -> list[torch.Tensor]:
    at = training("SGD", fused=True, momentum=0.9)
    read = way(at)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return at.step(x * choose(read()), y)

    run = pygraph.graph(step) if graphs else step
    losses = []
    for i, (x, y) in enumerate(batches(24)):
        at.optimizer.param_groups[0]["momentum"] = 0.5 + 0.02 * i
        losses.append(run(x, y).detach())
    return [*losses, *at.state()]


@pytest.mark.parametrize("way", _WAYS)
def test_a_choice_is_made_by_the_number_of_the_call(partitions: Any, way: Any) -> None:
    choose = lambda momentum: 2.0 if momentum > 0.8 else 1.0  # noqa: E731
    assert_same(train(way, choose, True), train(way, choose, False))


def test_one_that_is_passed_later_is_looked_at(partitions: Any) -> None:
    def train(graphs: bool) -> list[torch.Tensor]:
        at = training("SGD", fused=True, momentum=0.9)
        ways = [
            lambda: 1.0,
            lambda: 2.0 if at.optimizer.param_groups[0]["momentum"] > 0.8 else 1.0,
        ]

        def step(x: torch.Tensor, y: torch.Tensor, scale: Any) -> torch.Tensor:
            return at.step(x * scale(), y)

        run = pygraph.graph(step) if graphs else step
        losses = []
        for i, (x, y) in enumerate(batches(40)):
            at.optimizer.param_groups[0]["momentum"] = 0.5 + 0.012 * i
            losses.append(run(x, y, ways[i > 10]).detach())
        return [*losses, *at.state()]

    assert_same(train(True), train(False))


def test_a_tuple_in_place_of_a_number_is_not_given_to_the_graph(partitions: Any) -> None:
    at = training("SGD", fused=True, momentum=0.9)
    run = pygraph.graph(at.step)
    for i, (x, y) in enumerate(batches(20)):
        at.optimizer.param_groups[0]["momentum"] = 0.9 - 0.01 * i
        run(x, y)
    assert replays(partitions) > 4, pygraph.stats()
    at.optimizer.param_groups[0]["momentum"] = (0.7,)
    with pytest.raises(TypeError):
        run(*batches(1)[0])


def test_one_that_the_step_sets_is_set(partitions: Any) -> None:
    """The step sets a momentum that the loop moves later: a replay would leave the loop's."""

    def train(graphs: bool) -> list[Any]:
        at = training("SGD", fused=True, momentum=0.9)
        held: Any = at.optimizer.param_groups[0]
        for _ in range(6):
            held = [held]

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            held[0][0][0][0][0][0]["momentum"] = 0.5
            return at.step(x, y)

        run = pygraph.graph(step) if graphs else step
        found: list[Any] = []
        group = at.optimizer.param_groups[0]
        for i, (x, y) in enumerate(batches(30)):
            if i in (2, 4, 20, 24):
                group["momentum"] = 0.8
            found.append(run(x, y).detach())
            found.append(torch.tensor(group["momentum"]))
        return [*found, *at.state()]

    assert_same(train(True), train(False))


@pytest.mark.parametrize("value", [-0.0, 5e-324, 1e308, -0.5, float("inf"), True, 1])
def test_extreme_numbers_are_those_of_the_call(partitions: Any, value: Any) -> None:
    def train(graphs: bool) -> list[torch.Tensor]:
        at = training("SGD", fused=True, momentum=0.9, weight_decay=0.1)
        run = pygraph.graph(at.step) if graphs else at.step
        losses = []
        for i, (x, y) in enumerate(batches(26)):
            group = at.optimizer.param_groups[0]
            is_now = i in (12, 13, 20) if abs(value) <= 1 else i == 25  # after which all is NaN
            group["weight_decay"] = value if is_now else 0.1 / (1 + i % 4)
            if i == 16:
                group["weight_decay"] = 0.0
            if i == 18:
                group["dampening"] = 0.25
            losses.append(run(x, y).detach())
        return [t.nan_to_num() for t in (*losses, *at.state())]

    assert_same(train(True), train(False))
    assert replays(partitions) > 4, pygraph.stats()


def test_a_group_of_two_optimizers_has_one_number(partitions: Any) -> None:
    def train(graphs: bool) -> list[torch.Tensor]:
        at = training("SGD", fused=True, momentum=0.9)
        other = torch.optim.SGD(at.model.parameters(), lr=0.01, momentum=0.1, fused=True)
        other.param_groups[:] = at.optimizer.param_groups

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            at.model(x).sum().backward()
            other.step()
            other.zero_grad()
            return at.step(x, y)

        run = pygraph.graph(step) if graphs else step
        losses = []
        for i, (x, y) in enumerate(batches(20)):
            at.optimizer.param_groups[0]["momentum"] = 0.9 - 0.02 * i
            losses.append(run(x, y).detach())
        assert at.optimizer.param_groups[0]["momentum"] == 0.9 - 0.02 * 19
        return [*losses, *at.state()]

    assert_same(train(True), train(False))
    assert replays(partitions) > 6, pygraph.stats()


def test_loaded_replaced_and_added_groups_have_their_numbers(partitions: Any) -> None:
    def train(graphs: bool) -> list[torch.Tensor]:
        at = training("SGD", fused=True, momentum=0.9)
        extra = torch.nn.Parameter(torch.ones(3))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            (extra * y.sum()).sum().backward()
            loss = at.step(x, y)
            extra.grad = None
            return loss

        run = pygraph.graph(step) if graphs else step
        losses = []
        for i, (x, y) in enumerate(batches(60)):
            groups = at.optimizer.param_groups
            for n, group in enumerate(groups):
                group["momentum"] = 0.9 - 0.01 * i - 0.1 * n
            if i == 14:
                at.optimizer.load_state_dict(at.optimizer.state_dict())
            if i == 28:
                at.optimizer.add_param_group({"params": [extra], "momentum": 0.3})
            if i == 44:
                groups[:] = [dict(group) for group in reversed(groups)]
            losses.append(run(x, y).detach())
        return [*losses, *at.state(), extra.detach()]

    assert_same(train(True), train(False))
    assert replays(partitions) > 20, pygraph.stats()
