"""Small gradients and saved tensors share blocks of memory; nobody may notice but the allocator."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pygraph import runtime

from .support import assert_same, captured, compiled, randn, uncaptured

_LAYERS = 12


class Narrow(nn.Module):
    """Many small weights. Saves a transposed view of each for backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * torch.sigmoid(x)
        return x.square().mean()


def _step(model: Callable[..., Any], module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    model(x).backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


def _allocations(step: Callable[[], object]) -> int:
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    step()
    return int(torch.cuda.memory_stats()["allocation.all.allocated"] - before)


def _trained() -> tuple[nn.Module, Callable[..., Any], list[torch.Tensor]]:
    """A module whose forward and backward are captured."""
    module = Narrow().cuda()
    model = compiled(module)
    inputs = [randn(16, 64) for _ in range(4)]
    for x in inputs:
        _step(model, module, x)
    assert {row.name for row in captured()} >= {"forward", "backward"}
    return module, model, inputs


def test_a_step_takes_a_few_allocations() -> None:
    module, model, inputs = _trained()
    assert _allocations(lambda: _step(model, module, inputs[0])) <= 6
    storages = {p.grad.untyped_storage().data_ptr() for p in module.parameters() if p.grad is not None}
    assert len(storages) == 1


@pytest.mark.parametrize(("rows", "together"), [(128, 3), (512, 1)])
def test_saved_tensors_share_blocks_or_are_donated(rows: int, together: int) -> None:
    """Below 1 MiB and from 1 MiB on. Four tensors of 256 KiB would make a block of 1 MiB, which a
    backward would count on that was recorded after a replay of the forward."""
    torch.manual_seed(1)
    module = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(512, 512), nn.Tanh()))).cuda()
    model = compiled(lambda x: module(x).square().mean())
    x = randn(rows, 512)
    results = [[g.clone() for g in _step(model, module, x)] for _ in range(6)]
    (graph,) = [
        entry.graph
        for partition in list(runtime.partitions)
        if partition.info.is_backward
        for entry in partition.entries.values()
    ]
    assert bool(graph.donated) == (together == 1)
    assert (graph.donated_replays >= 4) == (together == 1)
    with uncaptured():
        expected = _step(model, module, x)
    for gradients in results:
        assert_same(gradients, expected)
    losses = [model(x) for _ in range(4)]
    calls = [[t for t in loss.grad_fn.saved_tensors if t.shape == x.shape] for loss in losses]
    assert min(len(saved) for saved in calls) >= 8
    shared = [collections.Counter(t.untyped_storage().data_ptr() for t in saved) for saved in calls]
    assert max(max(blocks.values()) for blocks in shared) == together


def test_gradients_that_are_kept_keep_their_values() -> None:
    module, model, inputs = _trained()
    with uncaptured():
        expected = [[g.clone() for g in _step(model, module, x)] for x in inputs]
    kept = [_step(model, module, x)[::5] for x in inputs]  # some of each step's
    for x in inputs:
        _step(model, module, x)
    assert_same(kept, [gradients[::5] for gradients in expected])


def test_gradients_accumulate_in_place() -> None:
    module, model, inputs = _trained()

    def accumulated() -> list[torch.Tensor]:
        module.zero_grad()
        for x in inputs:
            model(x).backward()
            for p in module.parameters():
                assert p.grad is not None
                p.grad.mul_(0.5)
        return [p.grad.clone() for p in module.parameters() if p.grad is not None]

    with uncaptured():
        expected = accumulated()
    assert_same(accumulated(), expected)


def test_a_gradient_recorded_on_another_stream_is_not_overwritten() -> None:
    """Tensor.record_stream on one gradient protects the whole block."""
    module, model, inputs = _trained()
    side = torch.cuda.Stream()
    gradient = _step(model, module, inputs[0])[3]
    expected = gradient.clone()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        read_late = gradient.clone()
    gradient.record_stream(side)
    del gradient
    for x in inputs:
        _step(model, module, x)
    torch.cuda.synchronize()
    assert_same(read_late, expected)


def test_a_compiled_optimizer_takes_gradients_of_one_block() -> None:
    def run() -> list[torch.Tensor]:
        torch._dynamo.reset()
        module, model, inputs = _trained()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        step = torch.compile(optimizer.step, backend="pygraph")
        for x in inputs * 2:
            _step(model, module, x)
            step()
        return [p.detach().clone() for p in module.parameters()]

    torch.manual_seed(3)
    first = run()
    torch.manual_seed(3)
    module, eager_inputs = Narrow().cuda(), [randn(16, 64) for _ in range(4)]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for x in eager_inputs * 2:
        _step(module, module, x)
        optimizer.step()
    for a, b in zip(first, module.parameters(), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-5)
