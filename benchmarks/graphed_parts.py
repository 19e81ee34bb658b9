"""The host's time for a training step, by how much of the step is in graphs.

    python -m benchmarks.graphed_parts [--layers 24] [--json FILE]

An MLP with SGD, forward, loss, backward, ``optimizer.step()`` and ``zero_grad()``: eager; half of the
model, or all of it, by ``torch.cuda.make_graphed_callables`` and by ``pygraph.graph``; the whole step
by ``torch.cuda.graph`` and by ``pygraph.graph``. Graphs by ``torch.cuda`` have fixed inputs, which
batches are copied into. All ways take turns; medians of rounds, microseconds per step.

host        until the step's call has returned; the GPU is idle when it begins
in a row    per step of a hundred, until the GPU has finished
launches    of kernels and of graphs by the host in one step, from PyTorch's profiler
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import pygraph
from pygraph.report.profile import kernels_of, trace_call

_WIDTH, _BATCH = 256, 64
_ROUNDS, _STEPS = 7, 100
_WARM_UP = 40
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cuGraphLaunch")

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass
class Way:
    """step: one training step. The times are those of the rounds."""

    name: str
    step: Step
    host_us: list[float] = dataclasses.field(default_factory=list)
    row_us: list[float] = dataclasses.field(default_factory=list)
    launches: int = 0


class Program:
    """The same at each construction."""

    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        blocks = [
            torch.nn.Sequential(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.ReLU()) for _ in range(layers)
        ]
        self.first: Any = torch.nn.Sequential(*blocks[: layers // 2]).cuda()
        self.second: Any = torch.nn.Sequential(*blocks[layers // 2 :]).cuda()
        self.all: Any = torch.nn.Sequential(self.first, self.second)
        self.optimizer = torch.optim.SGD(self.all.parameters(), lr=1e-3)
        self.model: Any = lambda x: self.second(self.first(x))

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(self.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def _by_pygraph(function: Any) -> Any:
    return pygraph.graph(function, select="always")


def _by_hand(program: Program) -> Step:
    """The step in one torch.cuda.graph."""
    x, y = _batch()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            program.step(x, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        loss = program.step(x, y)

    return functools.partial(_replay, program, graph, (x, y), loss)


def _replay(
    program: Program,  # whose memory the graph uses
    graph: torch.cuda.CUDAGraph,
    batch: tuple[torch.Tensor, torch.Tensor],
    loss: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
) -> torch.Tensor:
    batch[0].copy_(x)
    batch[1].copy_(y)
    graph.replay()
    return loss


def _ways(layers: int) -> list[Way]:
    def of_parts(first: bool, make: Callable[[Any], Any]) -> Step:
        program = Program(layers)
        if first:
            made, second = make(program.first), program.second
            program.model = lambda x: second(made(x))
        else:
            program.model = make(program.all)
        return program.step

    def callables(module: Any) -> Any:
        return torch.cuda.make_graphed_callables(module, (_batch()[0],))

    return [
        Way("eager", Program(layers).step),
        Way("half of the model, make_graphed_callables", of_parts(True, callables)),
        Way("half of the model, pygraph.graph", of_parts(True, _by_pygraph)),
        Way("the model, make_graphed_callables", of_parts(False, callables)),
        Way("the model, pygraph.graph", of_parts(False, _by_pygraph)),
        Way("the step, torch.cuda.graph", _by_hand(Program(layers))),
        Way("the step, pygraph.graph", _by_pygraph(Program(layers).step)),
    ]


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(_BATCH, _WIDTH, device="cuda"), torch.randn(_BATCH, _WIDTH, device="cuda")


def _measure(way: Way, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    torch.cuda.synchronize()
    hosts = []
    for batch in batches:
        start = time.perf_counter()
        way.step(*batch)
        hosts.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    way.host_us.append(statistics.median(hosts) * 1e6)
    start = time.perf_counter()
    for batch in batches:
        way.step(*batch)
    torch.cuda.synchronize()
    way.row_us.append((time.perf_counter() - start) / len(batches) * 1e6)


def _launches(way: Way, batch: tuple[torch.Tensor, torch.Tensor]) -> int:
    kernels = kernels_of(trace_call(lambda: way.step(*batch)))
    graphs = {kernel.launch for kernel in kernels if kernel.launch is not None}
    return len(graphs) + sum(kernel.launch is None for kernel in kernels)


def _rows(ways: list[Way]) -> list[dict[str, Any]]:
    return [
        {
            "way": way.name,
            "host_us": round(statistics.median(way.host_us), 1),
            "host_us_spread": [round(min(way.host_us), 1), round(max(way.host_us), 1)],
            "us": round(statistics.median(way.row_us), 1),
            "launches": way.launches,
        }
        for way in ways
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--json", type=Path, help="a file for the rows")
    args = parser.parse_args()
    batches = [_batch() for _ in range(_STEPS)]
    ways = _ways(args.layers)
    for way in ways:
        for batch in batches[:_WARM_UP]:
            way.step(*batch)
    for i in range(_ROUNDS):
        for k in range(len(ways)):
            _measure(ways[(i + k) % len(ways)], batches)
    for way in ways:
        way.launches = _launches(way, batches[0])
    rows = _rows(ways)
    title = f"A training step of an MLP with {args.layers} layers, microseconds"
    table = Table(title=f"{title} ({torch.cuda.get_device_name()}, PyTorch {torch.__version__})")
    for column in ("way", "host", "from ... to", "in a row", "launches"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for row in rows:
        low, high = row["host_us_spread"]
        table.add_row(
            row["way"],
            f"{row['host_us']:.1f}",
            f"{low:.1f} ... {high:.1f}",
            f"{row['us']:.1f}",
            str(row["launches"]),
        )
    Console(width=120).print(table)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    for stat in pygraph.stats():
        print(stat)


if __name__ == "__main__":
    main()
