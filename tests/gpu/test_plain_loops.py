"""Plain loops around a compiled model: ``optimizer.step()`` has a graph, with the same bits."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

import pygraph

from .graph_training import adamw, batches, fused_sgd, sgd
from .plain_loops import (
    STEPS,
    Loop,
    assert_trains_alike,
    clip_replays,
    plainly,
    step_replays,
)
from .support import captured

pytestmark = pytest.mark.usefixtures("own_cache")


def muon(parameters: Any) -> Any:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=1e-3)


def capturable_nadam(parameters: Any) -> Any:
    return torch.optim.NAdam(parameters, lr=1e-3, capturable=True)


@pytest.mark.parametrize("optimizer", [adamw, sgd, fused_sgd, muon, capturable_nadam])
def test_steps_are_replayed(optimizer: Any) -> None:
    kept = assert_trains_alike(plainly, optimizer)
    assert step_replays() > 15, pygraph.stats()
    del kept


def test_the_default_adamw_runs_as_it_is_and_says_why() -> None:
    kept = assert_trains_alike(plainly, lambda p: torch.optim.AdamW(p, lr=1e-3))
    assert step_replays() == 0
    reasons = [row.reason for row in pygraph.stats() if row.name == "AdamW.step"]
    assert any("counts its steps on the CPU" in reason for reason in reasons), pygraph.stats()
    del kept


@pytest.mark.parametrize("early", [False, True])
def test_a_scheduler_is_followed(early: bool) -> None:
    def train(loop: Loop) -> None:
        make = lambda: torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.9)  # noqa: E731
        scheduler = make() if early else None
        for i, (x, y) in enumerate(batches(STEPS)):
            if i == 8 and not early:
                scheduler = make()
            loop.step(x, y)
            if scheduler is not None:
                scheduler.step()

    kept = assert_trains_alike(train)
    assert step_replays() > 10, pygraph.stats()
    del kept


@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.parametrize("clips", [False, True])
def test_a_scaler_is_followed(optimizer: Any, clips: bool) -> None:
    def train(loop: Loop) -> None:
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=4)
        for i, (x, y) in enumerate(batches(STEPS)):
            loop.optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = F.cross_entropy(loop.call(x * (torch.inf if i == 9 else 1)), y)
            scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(loop.optimizer)
                loop.norms.append(clip_grad_norm_(loop.model.parameters(), 0.1))
            scaler.step(loop.optimizer)
            scaler.update()

    kept = assert_trains_alike(train, optimizer)
    assert step_replays() > 10, pygraph.stats()
    assert not clips or clip_replays() > 10, pygraph.stats()
    del kept


def test_gradients_are_accumulated() -> None:
    def train(loop: Loop) -> None:
        for i, (x, y) in enumerate(batches(4 * STEPS)):
            F.cross_entropy(loop.call(x), y).backward()
            if i % 4 == 3:
                loop.optimizer.step()
                loop.optimizer.zero_grad()

    kept = assert_trains_alike(train)
    assert step_replays() > 15, pygraph.stats()
    del kept


def test_a_checkpoint_is_loaded_and_a_group_added_midway() -> None:
    def train(loop: Loop) -> None:
        saved: Any = None
        extra = torch.nn.Parameter(torch.ones(10, device="cuda"))
        for i, (x, y) in enumerate(batches(3 * STEPS)):
            if i == 5:
                saved = torch.utils._pytree.tree_map_only(
                    torch.Tensor,
                    torch.clone,
                    (loop.model.state_dict(), loop.optimizer.state_dict()),
                )
            if i == STEPS:
                loop.model.load_state_dict(saved[0])
                loop.optimizer.load_state_dict(saved[1])
            if i == 2 * STEPS:
                loop.optimizer.add_param_group({"params": [extra], "lr": 1e-2})
            loop.optimizer.zero_grad()
            F.cross_entropy(loop.call(x) * extra, y).backward()
            loop.optimizer.step()

    kept = assert_trains_alike(train)
    assert step_replays() > 40, pygraph.stats()
    del kept


def test_a_loop_on_another_stream() -> None:
    def train(loop: Loop) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            data = batches(STEPS)
            for x, y in data:
                loop.step(x, y)
        torch.cuda.synchronize()

    kept = assert_trains_alike(train)
    del kept


def test_an_optimizer_and_its_memory_are_freed() -> None:
    loop = Loop(adamw, "auto")
    plainly(loop)
    assert step_replays() > 15
    gone = weakref.ref(loop.optimizer)
    pygraph.reset()
    torch._dynamo.reset()
    del loop
    gc.collect()
    assert gone() is None


def test_a_whole_step_by_graph_contains_the_optimizers() -> None:
    """A compiled model and its optimizer inside of a graphed callable: not one graph in another."""
    loop = Loop(adamw, "auto")
    plainly(loop)
    state = loop.state()
    expected = Loop(adamw, "auto")
    step = pygraph.graph(expected.step)
    for x, y in batches(STEPS):
        step(x, y)
    for a, b in zip(expected.state(), state, strict=True):
        assert torch.equal(a, b), pygraph.stats()
    assert sum(row.replays for row in captured() if row.name == "step") > 10, pygraph.stats()


@pytest.mark.parametrize("change", ["clear", "zero", "replace"])
def test_what_a_step_of_the_programs_own_class_makes_of_gradients(change: str) -> None:
    """The loop itself never clears them."""

    class Changing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    if change == "clear":
                        parameter.grad = None
                    elif change == "zero":
                        parameter.grad.zero_()
                    else:
                        parameter.grad = parameter.grad * 0.5

    def train(loop: Loop) -> None:
        for x, y in batches(STEPS):
            F.cross_entropy(loop.call(x), y).backward()
            loop.optimizer.step()

    kept = assert_trains_alike(train, lambda p: Changing(p, lr=1e-3, momentum=0.9))
    assert step_replays() > 10, pygraph.stats()
    del kept


def test_a_moving_momentum_is_followed() -> None:
    def train(loop: Loop) -> None:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(loop.optimizer, 2e-3, STEPS + 1)
        for x, y in batches(STEPS):
            loop.step(x, y)
            scheduler.step()

    kept = assert_trains_alike(train)
    assert step_replays() > 10, pygraph.stats()
    del kept
