"""Hooks for saved tensors that are the program's own, inside of a graphed callable and around it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks

from .gradient_programs import Pair, inputs, reasons, replays
from .test_graphed_gradient_calls import Module, both


def inside(hooks: Any) -> Any:
    def forward(self: Module, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.w
        with hooks():
            z = (y * self.b).sin() @ self.w
        return z.cos()

    return forward


INSIDE: dict[str, tuple[Any, str]] = {
    "as it is": (lambda: saved_tensors_hooks(lambda t: t, lambda t: t), "keeps memory"),
    "a copy": (lambda: saved_tensors_hooks(lambda t: t.clone(), lambda t: t), "keeps memory"),
    "detached": (lambda: saved_tensors_hooks(lambda t: t.detach(), lambda t: t), "keeps memory"),
    "another value": (lambda: saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2), "keeps memory"),
    "on the CPU": (save_on_cpu, "keeps memory"),
    "disabled": (lambda: disable_saved_tensors_hooks("not here"), "not here"),
}


@pytest.mark.parametrize("name", INSIDE)
def test_inside(gradients: Any, name: str) -> None:
    hooks, reason = INSIDE[name]
    pair = Pair(Module(inside(hooks)))
    pair.steps(16, 3, 4)
    pair.steps(3, 5, 4)
    assert replays(gradients, "backward") == 0 and reason in reasons(gradients)


@pytest.mark.parametrize("first", range(1, 8))
def test_disabled_around_some_calls(gradients: Any, first: int) -> None:
    pair = Pair(Module(lambda self, x: (x @ self.w).sin()))
    for number, x in enumerate(inputs(20, 3, 4)):
        is_disabled = first <= number < first + 4
        with disable_saved_tensors_hooks("not here") if is_disabled else contextlib.nullcontext():
            pair.step(x)
    assert both(gradients), reasons(gradients)
