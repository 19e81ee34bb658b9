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


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _top() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def leaving_open(rows: int) -> Pair:
    """Calls with so many rows leave hooks open, which the program closes."""

    def forward(self: Module, x: torch.Tensor) -> torch.Tensor:
        if len(x) >= rows:
            saved_tensors_hooks(_same, _same).__enter__()
        return (x @ self.w).sin()

    def call(run: Any, x: torch.Tensor) -> Any:
        result = run(x)
        if len(x) >= rows:
            assert _top() == (_same, _same)
            torch._C._autograd._pop_saved_tensors_default_hooks()
        assert _top() is None
        return result

    return Pair(Module(forward), call=call)


def test_hooks_that_each_call_leaves_open(gradients: Any) -> None:
    pair = leaving_open(rows=0)
    pair.steps(12, 3, 4)
    assert "leaves hooks for saved tensors open" in reasons(gradients)


@pytest.mark.parametrize("call", range(2, 8))
def test_hooks_that_one_call_leaves_open(gradients: Any, call: int) -> None:
    """Its layout is another one. The others' graphs stay in use."""
    pair = leaving_open(rows=5)
    for number, x in enumerate(inputs(16, 3, 4)):
        pair.step(torch.cat([x, x]) if number == call else x)
    assert both(gradients), reasons(gradients)


def test_hooks_that_are_left_open_in_a_recording(gradients: Any) -> None:
    pair = leaving_open(rows=5)
    for rows in (3, 6, 3):
        pair.steps(8, rows, 4)
    assert both(gradients), reasons(gradients)
