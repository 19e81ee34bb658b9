"""Plain loops around a compiled model: ``clip_grad_norm_`` has a graph, with the same bits."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

import pygraph

from .graph_training import adamw, batches, sgd
from .plain_loops import (
    STEPS,
    Loop,
    assert_trains_alike,
    clip_replays,
    clipping,
    step_replays,
)
from .support import captured

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize(
    "given", [(0.1,), (0.1, torch.inf), (100.0,), (0.1, 2.0, False, False), (0.1, 1.0, False, True)]
)
@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_clips_are_replayed(given: Any, optimizer: Any) -> None:
    clip = lambda loop, _: clip_grad_norm_(loop.model.parameters(), *given)  # noqa: E731
    kept = assert_trains_alike(clipping(clip), optimizer)
    assert step_replays() > 15 and clip_replays() > 15, pygraph.stats()
    assert len({norm.data_ptr() for norm in kept.norms}) == STEPS


def test_clips_of_gradients_that_accumulate() -> None:
    def train(loop: Loop) -> None:
        for i, (x, y) in enumerate(batches(4 * STEPS)):
            F.cross_entropy(loop.call(x), y).backward()
            if i % 4 == 3:
                loop.norms.append(torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1))
                loop.optimizer.step()
                loop.optimizer.zero_grad(set_to_none=i % 8 == 3)

    kept = assert_trains_alike(train)
    assert clip_replays() > 15, pygraph.stats()
    del kept


def test_clips_with_a_scheduler() -> None:
    def train(loop: Loop) -> None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.9)
        clip = lambda loop, _: clip_grad_norm_(loop.model.parameters(), 0.1)  # noqa: E731
        clipping(clip, also=lambda _, i: scheduler.step() if i else None)(loop)

    kept = assert_trains_alike(train)
    assert step_replays() > 10 and clip_replays() > 15, pygraph.stats()
    del kept


def test_each_norm_to_clip_to_has_a_graph() -> None:
    clip = lambda loop, i: clip_grad_norm_(loop.model.parameters(), 0.1 if i < STEPS else 0.2)  # noqa: E731
    kept = assert_trains_alike(clipping(clip, 2 * STEPS))
    assert clip_replays() > 20, pygraph.stats()
    del kept


def test_clips_of_parameters_that_are_frozen_midway() -> None:
    def freeze(loop: Loop, i: int) -> None:
        next(loop.model.children()).requires_grad_(not STEPS <= i < 2 * STEPS)

    clip = lambda loop, _: clip_grad_norm_(loop.model.parameters(), 0.1)  # noqa: E731
    kept = assert_trains_alike(clipping(clip, 3 * STEPS, freeze))
    assert clip_replays() > 40, pygraph.stats()
    del kept


def test_clips_of_infinite_gradients() -> None:
    def clip(loop: Loop, i: int) -> torch.Tensor:
        if i == STEPS - 2:
            next(p.grad for p in loop.model.parameters() if p.grad is not None).fill_(torch.inf)
        return clip_grad_norm_(loop.model.parameters(), 0.1)

    kept = assert_trains_alike(clipping(clip))
    assert clip_replays() > 15, pygraph.stats()
    del kept


def test_clips_that_raise_have_no_graph() -> None:
    def clip(loop: Loop, i: int) -> torch.Tensor:
        if i < STEPS - 1:
            return clip_grad_norm_(loop.model.parameters(), 0.1, error_if_nonfinite=True)
        next(p.grad for p in loop.model.parameters() if p.grad is not None).fill_(torch.inf)
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(loop.model.parameters(), 0.1, error_if_nonfinite=True)
        return torch.zeros(())

    kept = assert_trains_alike(clipping(clip))
    assert clip_replays() == 0 and step_replays() > 15
    del kept


def test_clips_on_another_stream() -> None:
    def train(loop: Loop) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            clipping(lambda loop, _: clip_grad_norm_(loop.model.parameters(), 0.1))(loop)
        torch.cuda.synchronize()

    kept = assert_trains_alike(train)
    assert clip_replays() > 0, pygraph.stats()
    del kept


def test_clips_of_each_parameter() -> None:
    def clip(loop: Loop, _: int) -> torch.Tensor:
        return torch.stack([clip_grad_norm_(p, 0.05) for p in loop.model.parameters()])

    kept = assert_trains_alike(clipping(clip))
    assert clip_replays() > 15, pygraph.stats()
    del kept


def test_graphs_of_clips_keep_no_parameters() -> None:
    loop = Loop(sgd, "auto")
    clipping(lambda loop, _: clip_grad_norm_(loop.model.parameters(), 0.1))(loop)
    assert clip_replays() > 15, pygraph.stats()
    gone = weakref.ref(next(loop.model.parameters()))
    pygraph.reset()
    torch._dynamo.reset()
    del loop
    gc.collect()
    assert gone() is None


def test_a_whole_step_by_graph_contains_its_clips() -> None:
    def train(graphs: bool) -> list[torch.Tensor]:
        loop = Loop(adamw, "auto")

        def whole(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loop.optimizer.zero_grad()
            F.cross_entropy(loop.call(x), y).backward()
            norm = clip_grad_norm_(loop.model.parameters(), 0.1)
            loop.optimizer.step()
            return norm

        step = pygraph.graph(whole) if graphs else whole
        norms = [step(x, y) for x, y in batches(STEPS)]
        if graphs:
            assert sum(row.replays for row in captured() if row.name == "whole") > 10, pygraph.stats()
        return [*loop.state(), *norms]

    for a, b in zip(train(True), train(False), strict=True):
        assert torch.equal(a, b), pygraph.stats()
