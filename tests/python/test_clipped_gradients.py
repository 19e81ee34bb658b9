"""Graphs of ``clip_grad_norm_`` in plain training loops, on the CPU: which gradients there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from pygraph.callables import trained

from .clip_loops import clips, train_alike
from .graphed_programs import batches
from .graphed_world import Replaying
from .optimizer_loops import OPTIONS, Loop, adamw, assert_trains_alike, loops


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    yield from loops(monkeypatch)


def test_missing_gradients(partitions: Any) -> None:
    def clip(loop: Loop, i: int) -> torch.Tensor:
        if i % 3 == 0:
            loop.model[0].bias.grad = None
        return clip_grad_norm_(loop.model.parameters(), 0.1)

    train_alike(clip, steps=30)
    assert len(clips(partitions)) == 2 and sum(clips(partitions)) > 20


def test_parameters_are_frozen_midway(partitions: Any) -> None:
    def freeze(loop: Loop, i: int) -> None:
        loop.model[0].requires_grad_(not 8 <= i < 18)

    train_alike(
        lambda loop, _: clip_grad_norm_(loop.model.parameters(), 0.1), adamw, steps=30, also=freeze
    )
    assert len(clips(partitions)) == 2 and sum(clips(partitions)) > 20


@pytest.mark.parametrize("is_twice", [False, True])
def test_parameters_with_one_gradient(partitions: Any, is_twice: bool) -> None:
    """One parameter that is passed twice, or two whose gradient is one tensor: it is scaled twice."""

    def clip(loop: Loop, _: int) -> torch.Tensor:
        first = loop.model[0].weight
        other = first if is_twice else torch.nn.Parameter(torch.zeros(5, 4))
        other.grad = first.grad
        return clip_grad_norm_([first, other, loop.model[0].bias], 0.1)

    train_alike(clip)
    assert clips(partitions) == [11]


def test_gradients_may_lie_in_one_bucket(partitions: Any) -> None:
    def train(loop: Loop) -> None:
        bucket = torch.zeros(sum(p.numel() for p in loop.model.parameters()))
        start = 0
        for p in loop.model.parameters():
            p.grad = bucket[start : start + p.numel()].view_as(p)
            start += p.numel()
        for x, y in batches(14):
            loop.optimizer.zero_grad(set_to_none=False)
            loop.backward(x, y)
            clip_grad_norm_(loop.model.parameters(), 0.1)
            loop.optimizer.step()

    assert_trains_alike(train)
    assert clips(partitions) == [11]


def test_sparse_gradients_run_as_they_are(partitions: Any) -> None:
    def train(graphs: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.EmbeddingBag(10, 3, sparse=True)
        if graphs:
            trained.note_program(model.parameters(), OPTIONS)
        for _ in range(8):
            model.zero_grad()
            model(torch.arange(8).reshape(4, 2)).square().sum().backward()
            norm = clip_grad_norm_(model.parameters(), 0.1)
        assert model.weight.grad is not None
        return torch.stack([norm, *model.weight.grad.to_dense().flatten()])

    assert torch.equal(train(True), train(False)) and clips(partitions) == []


class _Tensor(torch.Tensor):
    pass


@pytest.mark.parametrize("when", [0, 7])
def test_gradients_of_another_kind_run_as_they_are(partitions: Any, when: int) -> None:
    def clip(loop: Loop, i: int) -> torch.Tensor:
        if i >= when:
            weight = loop.model[0].weight
            weight.grad = weight.grad.as_subclass(_Tensor)
        return clip_grad_norm_(loop.model.parameters(), 0.1).as_subclass(torch.Tensor)

    train_alike(clip)
    assert sum(clips(partitions)) == max(0, when - 3)


def test_gradients_of_two_kinds_of_numbers(partitions: Any) -> None:
    def clip(loop: Loop, _: int) -> torch.Tensor:
        other = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        other.grad = loop.model[2].bias.grad.double()
        return clip_grad_norm_([*loop.model.parameters(), other], 0.1)

    train_alike(clip)
    assert clips(partitions) == [11]
