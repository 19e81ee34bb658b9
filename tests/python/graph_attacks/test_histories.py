"""State through which gradients flow to what a call used."""

from __future__ import annotations

from typing import Any

import torch

import pygraph

from .attacked import X, replays


def _program(ends_with_backward: bool) -> None:
    w, memory = torch.nn.Parameter(torch.ones(4)), torch.zeros(4)

    @pygraph.graph
    def run(x: torch.Tensor) -> torch.Tensor:
        memory.detach_()
        memory.copy_(x * w)
        if ends_with_backward:
            w.grad = None
            memory.sum().backward()
        return x * 2

    for i in range(14):
        x = X + i
        assert torch.equal(run(x), x * 2)
        if not ends_with_backward:
            w.grad = None
            memory.sum().backward()
        assert torch.equal(memory, x * w) and torch.equal(w.grad, x), i


def test_state_whose_backward_the_program_runs(partitions: Any, caplog: Any) -> None:
    """It would run that of an earlier call."""
    _program(ends_with_backward=False)
    assert "leaves memory with a history in autograd" in caplog.text


def test_state_whose_backward_is_run_in_the_call(partitions: Any) -> None:
    _program(ends_with_backward=True)
    assert replays(partitions) > 0
