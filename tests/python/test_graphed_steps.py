"""Steps by ``pygraph.graph`` on the CPU (graphed_world.py), against the same steps called directly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pygraph

from .graphed_programs import Training, adamw, assert_same, batches, fused_sgd, reason, replays, sgd


@pytest.mark.parametrize("zero_first", [False, True])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_a_step_trains_alike(partitions: Any, optimizer: Any, zero_first: bool) -> None:
    uncaptured, at = Training(optimizer, zero_first), Training(optimizer, zero_first)
    step = pygraph.graph(at.step)
    for x, y in batches(10):
        expected, loss = uncaptured.step(x, y), step(x, y)
        assert torch.equal(loss, expected) and not loss.requires_grad
        assert_same(at.state(), uncaptured.state())
    assert replays(partitions) >= 5


@pytest.mark.parametrize("optimizer", [adamw, fused_sgd])
def test_a_moving_rate_of_a_fused_optimizer_is_followed(partitions: Any, optimizer: Any) -> None:
    uncaptured, at = Training(optimizer), Training(optimizer)
    step = pygraph.graph(at.step)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(of.optimizer, 0.9) for of in (uncaptured, at)]
    for x, y in batches(10):
        uncaptured.step(x, y)
        step(x, y)
        for schedule in schedules:
            schedule.step()
    assert_same(at.state(), uncaptured.state())
    assert len(partitions.all) == 1 and replays(partitions) >= 5
    assert type(at.optimizer.param_groups[0]["lr"]) is float
    assert not at.optimizer.param_groups[0].get("capturable", False)


def test_a_rate_that_another_optimizer_freezes_is_part_of_the_signature(partitions: Any) -> None:
    uncaptured, at = Training(sgd), Training(sgd)
    step = pygraph.graph(at.step)
    for i, (x, y) in enumerate(batches(20)):
        for training in (uncaptured, at):
            training.optimizer.param_groups[0]["lr"] = 0.1 if i < 10 else 0.01
        uncaptured.step(x, y)
        step(x, y)
    assert_same(at.state(), uncaptured.state())
    assert len(partitions.all) == 2 and all(p.replays > 3 for p in partitions.all)


def test_a_rate_that_moves_in_each_call_is_named(partitions: Any) -> None:
    uncaptured, at = Training(sgd), Training(sgd)
    step = pygraph.graph(at.step)
    for i, (x, y) in enumerate(batches(20)):
        for training in (uncaptured, at):
            training.optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
        uncaptured.step(x, y)
        step(x, y)
    assert_same(at.state(), uncaptured.state())
    assert replays(partitions) == 0 and "param_groups[0]['lr'] differs from call to call" in reason()


def test_a_schedule_inside_of_the_step_is_named(partitions: Any) -> None:
    at = Training(adamw)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(at.optimizer, 0.9)

    @pygraph.graph
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        at.step(x, y)
        scheduler.step()

    for x, y in batches(8):
        step(x, y)
    assert "scheduler.last_epoch" in reason() and partitions.all == []


def test_gradients_are_accumulated(partitions: Any) -> None:
    def train(graphs: bool) -> list[torch.Tensor]:
        at = Training(adamw)

        def accumulate(x: torch.Tensor, y: torch.Tensor) -> None:
            F.cross_entropy(at.model(x), y).backward()

        run = pygraph.graph(accumulate) if graphs else accumulate
        for i, (x, y) in enumerate(batches(40)):
            run(x, y)
            if i % 4 == 3:
                at.optimizer.step()
                at.optimizer.zero_grad()
        return at.state()

    assert_same(train(True), train(False))
    assert replays(partitions) >= 15


def test_other_modes_of_a_model_have_graphs_of_their_own(partitions: Any) -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))

    @pygraph.graph
    @torch.no_grad()
    def function(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    other = copy.deepcopy(model)
    for mode in (True, False, True, False):
        model.train(mode), other.train(mode)
        for x, _ in batches(5):
            with torch.no_grad():
                assert torch.equal(function(x), other(x))
    assert len(partitions.all) == 2
    assert_same(list(model.state_dict().values()), list(other.state_dict().values()))


def test_a_scaler_and_a_fused_optimizer_are_in_the_step(partitions: Any) -> None:
    """The scaler fills a dictionary in each step, and then replaces it."""

    def scaled(at: Training) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(at.model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(at.optimizer)
            torch.nn.utils.clip_grad_norm_(at.model.parameters(), 1.0)
            scaler.step(at.optimizer)
            scaler.update()
            at.optimizer.zero_grad()
            return loss

        return step

    uncaptured, at = Training(adamw), Training(adamw)
    plain, step = scaled(uncaptured), pygraph.graph(scaled(at))
    for i, (x, y) in enumerate(batches(20)):
        x = x * (torch.inf if i == 12 else 1)  # a step that must be skipped
        assert torch.equal(step(x, y), plain(x, y).detach()) or i == 12
        assert_same([t.nan_to_num() for t in at.state()], [t.nan_to_num() for t in uncaptured.state()])
    assert replays(partitions) >= 5, reason()
