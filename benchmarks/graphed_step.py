"""A small training step: uncaptured, by ``pygraph.graph``, and in a graph captured by hand.

    PYGRAPH_UNTESTED_GRAPH=1 python -m benchmarks.graphed_step

An MLP of 4 x 1024, batch 64: forward, cross entropy, backward, clipping, fused AdamW, ``zero_grad``.
The three take turns; medians of microseconds per step, smallest and largest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import pygraph

_ROUNDS, _CALLS, _WARM_UP = 9, 200, 60

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def make_step() -> Step:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def by_hand(step: Step, x: torch.Tensor, y: torch.Tensor) -> Step:
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(x, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        loss = step(x, y)

    def replay(new_x: torch.Tensor, new_y: torch.Tensor) -> torch.Tensor:
        x.copy_(new_x)
        y.copy_(new_y)
        graph.replay()
        return loss

    return replay


def _microseconds(step: Step, x: torch.Tensor, y: torch.Tensor) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(_CALLS):
        step(x, y)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / _CALLS * 1e6


def main() -> None:
    x = torch.randn(64, 1024, device="cuda")
    y = torch.randint(0, 1024, (64,), device="cuda")
    steps: dict[str, Step] = {
        "uncaptured": make_step(),
        "pygraph.graph": pygraph.graph(make_step()),
        "by hand": by_hand(make_step(), x.clone(), y.clone()),
    }
    for step in steps.values():
        for _ in range(_WARM_UP):
            step(x, y)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(_ROUNDS):
        for name, step in steps.items():
            found[name].append(_microseconds(step, x, y))
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}")
    for name, values in found.items():
        median = statistics.median(values)
        print(f"{name:<14} {median:8.1f} us per step ({min(values):.1f} to {max(values):.1f})")
    for row in pygraph.stats():
        print(row.name, row.state, row.reason)


if __name__ == "__main__":
    main()
