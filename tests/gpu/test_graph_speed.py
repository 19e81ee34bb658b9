"""A step in one graph is at most as slow as the graph that one captures by hand."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import pygraph

from .support import captured, randn


def _seconds(step: Callable[[], object], calls: int = 200) -> float:
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def test_a_graphed_step_beats_the_uncaptured_one() -> None:
    layers = [m for _ in range(4) for m in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, y = randn(64, 1024), torch.randint(0, 1024, (64,), device="cuda")

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    uncaptured = _seconds(lambda: step(x, y))
    graphed = pygraph.graph(step)
    replayed = _seconds(lambda: graphed(x, y))
    optimizer.param_groups[0]["capturable"] = True
    by_hand = torch.cuda.CUDAGraph()
    with torch.autograd.set_multithreading_enabled(False), torch.cuda.graph(by_hand):
        step(x, y)
    hand_made = _seconds(by_hand.replay)
    start = time.perf_counter()
    for _ in range(5):
        graphed(x, y)
    host = (time.perf_counter() - start) / 5
    print(
        f"\nmicroseconds: uncaptured {uncaptured * 1e6:.0f}, graphed {replayed * 1e6:.0f}, "
        f"by hand {hand_made * 1e6:.0f}, host time of a graphed call {host * 1e6:.0f}"
    )
    assert captured(), pygraph.stats()
    assert replayed < uncaptured
