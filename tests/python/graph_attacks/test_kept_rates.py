"""Steps that keep a learning rate, which a graph follows, or what they compute from one."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph

from .attacked import X, replays

Step = Callable[[torch.Tensor], Any]
Keep = Callable[["_Keeper"], Any]


class _Keeper:
    """A step with followed rates; ``keep`` is called at its end."""

    def __init__(self, keep: Keep, make: Any, wrap: Callable[[Step], Step]) -> None:
        self.p = torch.nn.Parameter(torch.ones(4))
        self.q = torch.nn.Parameter(torch.ones(4))
        self.optimizer, self.other = make([self.p], lr=0.125), make([self.q], lr=0.125)
        self.log: dict[str, Any] = {"lr": 0.0}
        self.rates: list[Any] = [0]
        self.last: Any = 0.125
        self.keep = keep
        self.run = wrap(self.step)

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = ((x * self.p).sin() + self.q).sum()
        loss.backward()
        for optimizer in (self.optimizer, self.other):
            optimizer.step()
            optimizer.zero_grad()
        self.keep(self)
        return loss.detach()

    def state(self) -> list[Any]:
        groups = [of.param_groups[0]["lr"] for of in (self.optimizer, self.other)]
        kept = [self.log["lr"], *self.rates, self.last, *groups]
        return [*kept, self.p.detach().clone(), self.q.detach().clone()]


def _adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def _sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, fused=True)


def _assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, (a, b)


def _item(keeper: _Keeper) -> None:
    keeper.log["lr"] = keeper.group["lr"]


def _element(keeper: _Keeper) -> None:
    keeper.rates[0] = keeper.group["lr"]


def _new_list(keeper: _Keeper) -> None:
    keeper.rates = [group["lr"] for group in keeper.optimizer.param_groups]


def _attribute(keeper: _Keeper) -> None:
    keeper.last = keeper.group["lr"]


def _product(keeper: _Keeper) -> None:
    keeper.last = keeper.group["lr"] * 2


def _of_another_optimizer(keeper: _Keeper) -> None:
    keeper.other.param_groups[0]["lr"] = keeper.group["lr"]


_KEEPS = (_item, _element, _new_list, _attribute, _product, _of_another_optimizer)


@pytest.mark.parametrize("make", [_adamw, _sgd])
@pytest.mark.parametrize("keep", _KEEPS)
def test_a_rate_that_a_step_keeps_moves(partitions: Any, keep: Keep, make: Any) -> None:
    plain = _Keeper(keep, make, lambda step: step)
    graphed = _Keeper(keep, make, pygraph.graph)
    for i in range(24):
        for keeper in (plain, graphed):
            keeper.group["lr"] = 0.125 if i < 8 else 0.125 * 0.5 ** (i // 4)
        _assert_same(graphed.run(X + 1), plain.run(X + 1))
        for a, b in zip(graphed.state(), plain.state(), strict=True):
            _assert_same(a, b)


@pytest.mark.parametrize("make", [_adamw, _sgd])
@pytest.mark.parametrize("keep", [_item, _new_list, _attribute])
def test_a_rate_that_a_step_keeps_has_a_graph_for_each_value(
    partitions: Any, keep: Keep, make: Any
) -> None:
    keeper = _Keeper(keep, make, pygraph.graph)
    made = []
    for i in range(40):
        keeper.group["lr"] = 0.125 if i < 20 else 0.0625
        keeper.run(X + 1)
        made.append(replays(partitions))
    assert made[19] > 4, pygraph.stats()
    assert made[39] > made[19] + 4, pygraph.stats()


def test_a_step_that_keeps_no_rate_has_a_graph(partitions: Any) -> None:
    def fill(keeper: _Keeper) -> None:
        keeper.rates = [0, 1]  # a new list, with the old contents

    keeper = _Keeper(fill, _adamw, pygraph.graph)
    for i in range(16):
        keeper.group["lr"] = 0.125 / (i + 1)
        keeper.run(X + 1)
    assert replays(partitions) > 4, pygraph.stats()


def test_a_loss_by_the_last_rate(partitions: Any) -> None:
    class Corrected:
        def __init__(self, wrap: Callable[[Step], Step]) -> None:
            self.p = torch.nn.Parameter(torch.ones(4))
            self.optimizer = _adamw([self.p], 0.125)
            self.last: Any = 0.125
            self.run = wrap(self.step)

        def step(self, x: torch.Tensor) -> torch.Tensor:
            rate = self.optimizer.param_groups[0]["lr"]
            loss = ((x * self.p).sin() * (rate / self.last)).sum()
            self.last = rate
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()

    plain, graphed = Corrected(lambda step: step), Corrected(pygraph.graph)
    for i in range(14):
        for of in (plain, graphed):
            of.optimizer.param_groups[0]["lr"] = 0.125 if i < 9 else 0.0625
        _assert_same(graphed.run(X + 1), plain.run(X + 1))
        assert graphed.last == plain.last


def _copied(keeper: _Keeper) -> None:
    keeper.other.param_groups[0]["lr"] = keeper.group["lr"] * 0.5


@pytest.mark.parametrize("keep", [_of_another_optimizer, _copied])
def test_a_rate_that_a_step_gives_to_another_optimizer(partitions: Any, keep: Keep) -> None:
    """While it does not move, there is a graph, and not one for each call."""
    keeper = _Keeper(keep, _adamw, pygraph.graph)
    for _ in range(40):
        keeper.run(X + 1)
    assert replays(partitions) > 10, pygraph.stats()
    assert len(partitions.all) < 6


def test_a_rate_that_a_step_returns(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = _adamw([p], 0.125)

    @pygraph.graph
    def step(x: torch.Tensor) -> tuple[torch.Tensor, float]:
        loss = (x * p).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), optimizer.param_groups[0]["lr"]

    for i in range(30):
        optimizer.param_groups[0]["lr"] = 0.125 if i < 15 else 0.0625
        assert step(X + 1)[1] == optimizer.param_groups[0]["lr"]
    assert replays(partitions) > 6, pygraph.stats()


class _Slotted:
    __slots__ = ("rate",)


@pytest.mark.parametrize("kind", ["deque", "set", "slot"])
def test_a_recording_leaves_no_rate_in_a_container(partitions: Any, kind: str) -> None:
    """What the step reads there in the next call, or in the same one."""

    class Smoothed:
        def __init__(self, wrap: Callable[[Step], Step]) -> None:
            self.p = torch.nn.Parameter(torch.ones(4))
            self.optimizer = _adamw([self.p], 0.125)
            self.last: Any = collections.deque([0.125] * 3, maxlen=3)
            self.seen: set[Any] = {0.125}
            self.slot = _Slotted()
            self.slot.rate = 0.125
            self.run = wrap(self.step)

        def factor(self) -> Any:
            rate = self.optimizer.param_groups[0]["lr"]
            if kind == "deque":
                self.last.append(rate)
                return sum(self.last) / 3
            if kind == "set":
                self.seen.add(rate)
                return sum(self.seen) / len(self.seen)
            self.slot.rate = 0.5 * self.slot.rate + 0.5 * rate
            return self.slot.rate

        def step(self, x: torch.Tensor) -> torch.Tensor:
            loss = ((x * self.p).sin() * self.factor()).sum()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()

    plain, graphed = Smoothed(lambda step: step), Smoothed(pygraph.graph)
    for i in range(30):
        for of in (plain, graphed):
            of.optimizer.param_groups[0]["lr"] = 0.125 if i < 9 else 0.125 / (i // 6)
        _assert_same(graphed.run(X + 1), plain.run(X + 1))
        assert list(graphed.last) == list(plain.last)
        assert graphed.seen == plain.seen
        assert graphed.slot.rate == plain.slot.rate


def test_momentum_that_a_monitor_reads_through_c(partitions: Any) -> None:
    class Monitor:
        def __init__(self) -> None:
            self.values: dict[str, str] = {}
            self.sources: dict[str, Any] = {}

        def update(self) -> None:
            for name, group in self.sources.items():
                self.values[name] = "%.4f" % group["momentum"]  # noqa: UP031

    class Trainer:
        def __init__(self, wrap: Callable[[Step], Step]) -> None:
            self.p = torch.nn.Parameter(torch.ones(4))
            self.optimizer = _sgd([self.p], 0.125)
            self.log = {"monitor": Monitor()}
            self.log["monitor"].sources["main"] = self.optimizer.param_groups[0]
            self.run = wrap(self.step)

        def step(self, x: torch.Tensor) -> torch.Tensor:
            loss = (x * self.p).sin().sum()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.log["monitor"].update()
            return loss.detach()

    plain, graphed = Trainer(lambda step: step), Trainer(pygraph.graph)
    for i in range(40):
        for of in (plain, graphed):
            of.optimizer.param_groups[0]["momentum"] = 0.9 - 0.01 * max(0, i - 8)
        _assert_same(graphed.run(X + 1), plain.run(X + 1))
        assert graphed.log["monitor"].values == plain.log["monitor"].values
