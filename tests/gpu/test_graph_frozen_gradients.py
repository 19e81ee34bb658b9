"""Gradients of tensors that require none: optimizers use them, and programs set them between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph

from .support import captured, randn

_WARM = 24  # calls after which a small callable is replayed
_FATES = ("cleared", "cleared, kept elsewhere", "replaced", "appear")


def _assert_same_series(make: Callable[[Any], list[torch.Tensor]]) -> None:
    """make: makes calls of a step, given what wraps it."""
    expected, got = make(lambda function: function), make(pygraph.graph)
    assert sum(row.replays for row in captured()) > 0, pygraph.stats()
    wrong = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if not torch.equal(a, b)]
    assert not wrong, f"results {wrong} of {len(got)} differ"


@pytest.mark.parametrize("fate", _FATES)
@pytest.mark.parametrize("user", ["optimizer", "clipping"])
def test_gradients_of_frozen_parameters(fate: str, user: str) -> None:
    """Frozen layers whose gradients are stale, or set by the program."""

    def make(wrap: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        body, head = (torch.nn.Linear(8, 8, device="cuda") for _ in range(2))
        used = [*body.parameters(), *head.parameters()]
        optimizer = torch.optim.SGD(used if user == "optimizer" else head.parameters(), lr=0.125)
        x = randn(4, 8)
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
        series = [call(x).detach().clone() for _ in range(_WARM)]
        for p in body.parameters():
            p.grad = None if "cleared" in fate else torch.full_like(p, 0.5)
        for _ in range(4):
            series.append(call(x).detach().clone())
            series += [p.detach().clone() for p in (*body.parameters(), *head.parameters())]
        del old
        return series

    _assert_same_series(make)


@pytest.mark.parametrize("appears", [False, True])
def test_a_gradient_of_a_buffer_is_read(appears: bool) -> None:
    importance, x = torch.ones(4, device="cuda"), randn(4)
    importance.grad = None if appears else torch.ones(4, device="cuda")

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 if importance.grad is None else 2.0)

    graphed = pygraph.graph(function)
    for _ in range(_WARM):
        graphed(x)
    assert sum(row.replays for row in captured()) > 0, pygraph.stats()
    importance.grad = torch.ones(4, device="cuda") if appears else None
    for _ in range(3):
        assert torch.equal(graphed(x), function(x))


def test_gradients_are_estimated_without_autograd() -> None:
    """Evolution strategies: the step sets gradients of parameters that require none."""

    def make(wrap: Any) -> list[torch.Tensor]:
        p = torch.nn.Parameter(torch.ones(4, device="cuda"), requires_grad=False)
        optimizer = torch.optim.SGD([p], lr=0.125)

        def step(x: torch.Tensor) -> torch.Tensor:
            p.grad = (p - x).sign() * x
            optimizer.step()
            return p.sum()

        call, series = wrap(step), []
        for i in range(_WARM):
            series.append(call(torch.full((4,), float(i), device="cuda")).clone())
            assert p.grad is not None
            series += [p.clone(), p.grad.clone()]
        return series

    _assert_same_series(make)
