"""A callable that saves something elsewhere while it is recorded, as attention does: its random state
is on the GPU then, and on the host in uncaptured runs. Here the host is the device "meta"."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import pytest
import torch

from pygraph.callables import backward_function, variant

from . import gradient_world
from .contexts import comparing
from .gradient_programs import Pair, inputs, reasons
from .gradient_world import _clones
from .graphed_world import assert_equal
from .test_graphed_gradient_calls import Module, both

PLACE: ContextVar[str] = ContextVar("PLACE", default="meta")  # of the random state


class Attention(torch.autograd.Function):
    """Its backward has no use for the random state, as attention's without dropout."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, torch.empty((), dtype=torch.int64, device=PLACE.get()))
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, _ = ctx.saved_tensors
        return gradient * x.cos()


class Partition(gradient_world.Partition):
    """A verification has runs on clones, as where results are left to chance."""

    def _record(self, layout: Any, given: list[Any]) -> None:
        token = PLACE.set("cpu")
        try:
            super()._record(layout, given)
        finally:
            PLACE.reset(token)

    def callable(self, inputs: list[Any]) -> Sequence[Any]:
        if any(inputs[i].is_meta for i in self.info.on_host):
            return self.function(inputs)  # as the engine's do
        return super().callable(inputs)

    def verify(self, inputs: list[Any], before: list[Any], replayed: Sequence[Any]) -> Sequence[Any]:
        for _ in range(2):
            assert len(self.function(_clones(inputs))) == len(replayed)
        kept = list(inputs)
        with comparing():
            outputs = self.function(inputs)
        pairs = [(a, b) for a, b in zip(outputs, replayed, strict=True) if not a.is_meta]
        assert_equal([*(a for a, _ in pairs), *kept], [*(b for _, b in pairs), *before])
        return outputs


@pytest.fixture(autouse=True)
def elsewhere(gradients: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor)
    monkeypatch.setattr(variant, "Partition", Partition)
    monkeypatch.setattr(backward_function, "Partition", Partition)


def attend(self: Module, x: torch.Tensor) -> torch.Tensor:
    return Attention.apply(x @ self.w) * self.b


def test_runs_on_clones_know_the_random_state(gradients: Any) -> None:
    pair = Pair(Module(attend))
    pair.steps(16, 3, 4)
    assert both(gradients), reasons(gradients)


def test_a_backward_without_a_graph_reads_it_on_the_host(
    gradients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(Module(attend))
    pair.steps(16, 3, 4)
    (x,) = inputs(1, 3, 4, seed=5)
    losses = [run(x.clone().requires_grad_()).sum() for run in (pair.plain, pair.run)]
    moved = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: moved.append(tensor.dtype) or tensor)
    for module, loss in zip((pair.plain, pair.graphed), losses, strict=True):
        module.w.data = module.w.data.clone()  # so that a graph must not serve the backward
        loss.backward()
    pair.compare()
    assert moved == [torch.int64]
