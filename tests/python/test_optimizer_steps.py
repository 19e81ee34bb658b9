"""Plain training loops, whose ``optimizer.step()`` has graphs, on the CPU: what is followed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pygraph

from .graphed_programs import batches, reason, replays
from .graphed_world import Replaying
from .optimizer_loops import Loop, adamw, assert_trains_alike, loops, plainly, sgd

_optim: Any = torch.optim


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    yield from loops(monkeypatch)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9, "foreach": True}),
        ("SGD", {"momentum": 0.9, "fused": True, "maximize": True}),
        ("Adam", {"fused": True, "weight_decay": 0.1}),
        ("AdamW", {"fused": True, "amsgrad": True}),
        ("Adagrad", {"fused": True}),
        *((name, {"capturable": True}) for name in ("Adam", "NAdam", "RAdam", "Adamax", "RMSprop")),
        *((name, {"capturable": True}) for name in ("Rprop", "ASGD", "Adadelta")),
    ],
)
def test_steps_are_replayed(partitions: Any, name: str, given: Any) -> None:
    loop = assert_trains_alike(plainly, lambda p: getattr(_optim, name)(p, lr=0.05, **given))
    assert replays(partitions) > 5, pygraph.stats()
    assert hasattr(loop.optimizer.step, "pygraph_route")


@pytest.mark.parametrize(
    "name", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adafactor"]
)
def test_other_forms_run_as_they_are_and_say_why(partitions: Any, name: str) -> None:
    loop = assert_trains_alike(plainly, lambda p: getattr(_optim, name)(p, lr=0.05))
    assert partitions.all == []
    assert f"{name}.step.optimizer counts its steps on the CPU" in reason()
    del loop


@pytest.mark.parametrize("early", [False, True])
def test_a_scheduler_is_followed(partitions: Any, early: bool) -> None:
    """Schedulers wrap an optimizer's step, before it has a graph or after."""

    def train(loop: Loop) -> None:
        make = lambda: torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.9)  # noqa: E731
        scheduler = make() if early else None
        for i, (x, y) in enumerate(batches(24)):
            if i == 5 and not early:
                scheduler = make()
            loop.step(x, y)
            if scheduler is not None:
                scheduler.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a scheduler that misses the optimizer's steps
        assert_trains_alike(train)
    assert replays(partitions) > 10, pygraph.stats()


@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaler_is_followed(partitions: Any, optimizer: Any, unscales: bool) -> None:
    def train(loop: Loop) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
        for i, (x, y) in enumerate(batches(20)):
            loop.optimizer.zero_grad()
            scaler.scale(F.cross_entropy(loop.model(x * (torch.inf if i == 9 else 1)), y)).backward()
            if unscales:
                scaler.unscale_(loop.optimizer)
                torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
            scaler.step(loop.optimizer)
            scaler.update()
            assert not hasattr(loop.optimizer, "found_inf")

    assert_trains_alike(train, optimizer)
    assert replays(partitions) > 8, pygraph.stats()


def test_gradients_are_accumulated(partitions: Any) -> None:
    def train(loop: Loop) -> None:
        for i, (x, y) in enumerate(batches(40)):
            loop.backward(x, y)
            if i % 4 == 3:
                loop.optimizer.step()
                loop.optimizer.zero_grad(set_to_none=i % 8 == 3)

    assert_trains_alike(train)
    assert replays(partitions) > 3, pygraph.stats()


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_gradients_are_clipped(partitions: Any, clip: str) -> None:
    def train(loop: Loop) -> None:
        for x, y in batches(14):
            loop.optimizer.zero_grad()
            loop.backward(x, y)
            getattr(torch.nn.utils, clip)(loop.model.parameters(), 0.1)
            loop.optimizer.step()

    assert_trains_alike(train)
    assert replays(partitions) > 5


def test_a_group_is_added_midway(partitions: Any) -> None:
    def train(loop: Loop) -> None:
        torch.manual_seed(1)
        head = torch.nn.Linear(4, 3)
        for i, (x, y) in enumerate(batches(28)):
            if i == 10:
                loop.optimizer.add_param_group({"params": head.parameters(), "lr": 0.1})
            loop.optimizer.zero_grad()
            F.cross_entropy(loop.model(x) + head(x), y).backward()
            loop.optimizer.step()
        loop.model.append(head)

    assert_trains_alike(train)
    assert replays(partitions) > 12


@pytest.mark.parametrize("copies", [False, True])
def test_a_checkpoint_is_loaded_midway(partitions: Any, copies: bool) -> None:
    def train(loop: Loop) -> None:
        saved: Any = None
        for i, (x, y) in enumerate(batches(30)):
            if i == 5:
                saved = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
            if i == 15:
                model, optimizer = copy.deepcopy(saved) if copies else saved
                loop.model.load_state_dict(model)
                loop.optimizer.load_state_dict(optimizer)
            loop.step(x, y)

    assert_trains_alike(train)
    assert replays(partitions) > 12


def test_two_optimizers_have_graphs_of_their_own(partitions: Any) -> None:
    def train(loop: Loop) -> None:
        first, second = loop.model[0], loop.model[2]
        optimizers = [adamw(first.parameters()), sgd(second.parameters())]
        for x, y in batches(16):
            loop.model.zero_grad()
            loop.backward(x, y)
            for optimizer in optimizers:
                optimizer.step()

    assert_trains_alike(train)
    assert len(partitions.all) == 2 and all(p.replays > 5 for p in partitions.all)


def test_parameters_are_frozen_midway(partitions: Any) -> None:
    def train(loop: Loop) -> None:
        for i, (x, y) in enumerate(batches(30)):
            loop.model[0].requires_grad_(not 8 <= i < 18)
            loop.step(x, y)

    assert_trains_alike(train)
    assert len(partitions.all) >= 2 and replays(partitions) > 12


def test_other_numbers_have_graphs_of_their_own(partitions: Any) -> None:
    def train(loop: Loop) -> None:
        for i, (x, y) in enumerate(batches(24)):
            loop.optimizer.param_groups[0]["weight_decay"] = 0.0 if i < 12 else 0.1
            loop.step(x, y)

    assert_trains_alike(train)
    assert len(partitions.all) == 2


def test_a_rate_that_moves_and_cannot_be_followed_runs_as_it_is(partitions: Any) -> None:
    def train(loop: Loop) -> None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.9)
        for x, y in batches(20):
            loop.step(x, y)
            scheduler.step()

    loop = assert_trains_alike(train, sgd)
    assert replays(partitions) == 0 and "make SGD with fused=True" in reason()
    del loop
