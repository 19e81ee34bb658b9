"""Gradients of tensors that require none: optimizers and clipping use them, and programs set them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph

from .attacked import assert_replays_follow, replays

_FATES = ("cleared", "cleared, kept elsewhere", "replaced", "appear")
Wrap = Callable[[Any], Any]


def _assert_same_series(partitions: Any, make: Callable[[Wrap], list[torch.Tensor]]) -> None:
    """make: makes calls of a step, given what wraps it."""
    expected = make(lambda function: function)
    got = make(pygraph.graph)
    assert replays(partitions) > 0, "there is no graph"
    wrong = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if not torch.equal(a, b)]
    assert not wrong, f"results {wrong} of {len(got)} differ"


@pytest.mark.parametrize("fate", _FATES)
@pytest.mark.parametrize("user", ["optimizer", "clipping"])
def test_gradients_of_frozen_parameters(partitions: Any, fate: str, user: str) -> None:
    def make(wrap: Wrap) -> list[torch.Tensor]:
        torch.manual_seed(0)
        body, head = (torch.nn.Linear(8, 8) for _ in range(2))
        used = [*body.parameters(), *head.parameters()]
        optimizer = torch.optim.SGD(used if user == "optimizer" else head.parameters(), lr=0.125)
        x = torch.randn(4, 8)
        if fate != "appear":
            head(body(x)).square().mean().backward()
            head.zero_grad()
        body.requires_grad_(False)
        old = [p.grad for p in body.parameters()] if "kept" in fate or fate == "replaced" else []

        def step(x: torch.Tensor) -> Any:
            loss: Any = head(body(x)).square().mean()
            loss.backward()
            if user == "clipping":
                torch.nn.utils.clip_grad_norm_(used, 0.5)
            optimizer.step()
            for p in head.parameters():
                p.grad = None
            return loss

        call = wrap(step)
        series = [call(x).detach().clone() for _ in range(10)]
        for p in body.parameters():
            p.grad = None if "cleared" in fate else torch.full_like(p, 0.5)
        for _ in range(4):
            series.append(call(x).detach().clone())
            series += [p.detach().clone() for p in (*body.parameters(), *head.parameters())]
        del old
        return series

    _assert_same_series(partitions, make)


def test_a_gradient_of_a_buffer_is_read(partitions: Any) -> None:
    importance = torch.ones(4)
    importance.grad = torch.ones(4)
    assert_replays_follow(
        partitions,
        lambda x: x * (1.0 if importance.grad is None else 2.0),
        lambda: setattr(importance, "grad", None),
    )


def test_a_gradient_of_a_buffer_appears(partitions: Any) -> None:
    importance = torch.ones(4)
    assert_replays_follow(
        partitions,
        lambda x: x * (1.0 if importance.grad is None else 2.0),
        lambda: setattr(importance, "grad", torch.ones(4)),
    )


def test_a_gradient_of_a_moment_is_read(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([p], lr=0.5, momentum=0.5)
    p.grad = torch.ones(4)
    optimizer.step()
    moment = optimizer.state[p]["momentum_buffer"]

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 if optimizer.state[p]["momentum_buffer"].grad is None else 2.0)

    assert_replays_follow(partitions, step, lambda: setattr(moment, "grad", torch.ones(4)))


def test_gradients_are_estimated_without_autograd(partitions: Any) -> None:
    """Evolution strategies: the step sets gradients of parameters that require none."""

    def make(wrap: Wrap) -> list[torch.Tensor]:
        p = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        optimizer = torch.optim.SGD([p], lr=0.125)

        def step(x: torch.Tensor) -> torch.Tensor:
            p.grad = (p - x).sign() * x
            optimizer.step()
            return p.sum()

        call, series = wrap(step), []
        for i in range(12):
            series.append(call(torch.full((4,), float(i))).clone())
            assert p.grad is not None
            series += [p.clone(), p.grad.clone()]
        return series

    _assert_same_series(partitions, make)


def test_a_retained_gradient_is_read(partitions: Any) -> None:
    w = torch.ones(4, requires_grad=True)
    held: Any = w * 2
    held.retain_grad()

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 if held.grad is None else 2.0)

    assert_replays_follow(partitions, step, lambda: held.sum().backward())


def test_a_gradient_of_an_argument_is_read(partitions: Any) -> None:
    frozen = torch.ones(4)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 if x.grad is None else 2.0)

    graphed = pygraph.graph(step)
    for _ in range(12):
        graphed(frozen)
    frozen.grad = torch.ones(4)
    assert torch.equal(graphed(frozen), step(frozen))
