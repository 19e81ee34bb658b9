"""Plain training loops: optimizers of the program's own classes, whose steps have graphs."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from .graphed_programs import assert_same, batches, replays
from .graphed_world import Replaying
from .optimizer_loops import Loop, assert_trains_alike, loops, plainly, sgd

_SGD: Any = torch.optim.SGD
_RATES = {"lr": 0.05, "momentum": 0.9}


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    yield from loops(monkeypatch)


def _halved(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 0.5


@pytest.mark.parametrize(
    "change",
    [
        lambda parameter: setattr(parameter, "grad", None),
        lambda parameter: parameter.grad.zero_(),
        _halved,
    ],
    ids=["cleared", "zeroed", "replaced"],
)
def test_what_a_step_makes_of_gradients(partitions: Any, change: Callable[[Any], Any]) -> None:
    """The loop itself never clears them."""

    class Changing(_SGD):  # type: ignore[misc]
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    change(parameter)

    def train(loop: Loop) -> None:
        for x, y in batches(14):
            loop.backward(x, y)
            loop.optimizer.step()

    assert_trains_alike(train, lambda p: Changing(p, **_RATES))
    assert replays(partitions) > 5


class _Copied(_SGD):  # type: ignore[misc]
    """Its copies have all of its attributes."""

    def __getstate__(self) -> Any:
        return self.__dict__.copy()


def _own_step(self: Any) -> None:
    _Copied.step(self)


def _pickled(optimizer: Any) -> Any:
    return pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize(
    ("copied", "has_own"), [(copy.deepcopy, False), (copy.deepcopy, True), (_pickled, False)]
)
def test_a_copy_of_all_attributes_steps_alone(partitions: Any, copied: Any, has_own: bool) -> None:
    def made(parameters: Any) -> Any:
        optimizer = _Copied(parameters, **_RATES)
        if has_own:
            optimizer.step = _own_step.__get__(optimizer)
        return optimizer

    loop, plain = Loop(made), Loop(made, graphs=False)
    for of in (loop, plain):
        plainly(of)
    before, found = loop.state(), []
    for of in (loop, plain):
        other = copied(of.optimizer)
        parameters = other.param_groups[0]["params"]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        other.step()
        found.append([parameter.detach() for parameter in parameters])
    assert_same(loop.state(), before)
    assert_same(*found)


@pytest.mark.parametrize("hash_", [None, lambda _: 1], ids=["no hash", "one hash"])
def test_optimizers_that_are_equal(partitions: Any, hash_: Any) -> None:
    attributes = {"__eq__": lambda self, other: type(other) is type(self), "__hash__": hash_}
    kind: Any = type("Equal", (torch.optim.SGD,), attributes)
    assert_trains_alike(plainly, lambda p: kind(p, **_RATES))
    assert replays(partitions) > 5


class _Scaled(_SGD):  # type: ignore[misc]
    def step(self, closure: Any = None, scale: float | None = 1.0) -> Any:
        if scale is None:
            return "skipped"
        return super().step(closure)


def test_an_argument_may_be_none_that_is_something_else_otherwise(partitions: Any) -> None:
    def train(loop: Loop) -> None:
        for i, (x, y) in enumerate(batches(20)):
            loop.optimizer.zero_grad()
            loop.backward(x, y)
            given: Any = {"scale": None} if i % 4 == 3 else {}
            assert loop.optimizer.step(**given) == ("skipped" if given else None)

    assert_trains_alike(train, lambda p: _Scaled(p, **_RATES))
    assert replays(partitions) > 5


@pytest.mark.parametrize("wrong", [((None, None), {}), ((), {"another": None})])
def test_arguments_that_a_step_does_not_take(partitions: Any, wrong: Any) -> None:
    loop = Loop(sgd)
    plainly(loop)
    with pytest.raises(TypeError):
        loop.optimizer.step(*wrong[0], **wrong[1])
    plainly(loop)


def test_a_step_shows_what_it_takes(partitions: Any) -> None:
    """``GradScaler`` looks there for ``grad_scaler``."""
    loop, plain = Loop(sgd), Loop(sgd, graphs=False)
    plainly(loop)
    assert hasattr(loop.optimizer.step, "pygraph_route")
    assert inspect.signature(loop.optimizer.step) == inspect.signature(plain.optimizer.step)
