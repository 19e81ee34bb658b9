"""The host time of a replay, by inputs, outputs and touched nodes.

    python -m benchmarks.replay_cost

Calls the engine's callable directly (no Dynamo, no AOTAutograd), on graphs that vary in one property.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pygraph import runtime
from pygraph.record import recorder

_CALLS = 300
_ROUNDS = 7

Function = Callable[[list[Any]], tuple[Any, ...]]


def _capture(function: Function, args: list[Any], saved: tuple[int, ...] = ()) -> Any:
    function(list(args))
    torch.cuda.synchronize()
    request = recorder.Request(function, args, device=0, sharing=saved, capacity=1 << 36)
    recording = recorder.record(request)
    engine = runtime.engine()
    partition = engine.graphed_callable(function, function, 0)
    engine.add_graph(partition, recording.graph, 1, 0)
    return partition, recording.graph


def _host_us(call: Callable[[int], None]) -> float:
    times = []
    for _ in range(_ROUNDS):
        for i in range(20):
            call(i)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(_CALLS):
            call(i)
            if i % 50 == 49:  # keep the launch queue short; the wait is not counted
                pause = time.perf_counter()
                torch.cuda.synchronize()
                start += time.perf_counter() - pause
        times.append((time.perf_counter() - start) / _CALLS * 1e6)
    return statistics.median(times)


def _chain(nodes: int) -> Function:
    def function(args: list[Any]) -> tuple[Any, ...]:
        (x,) = args
        args.clear()
        y = x
        for _ in range(nodes):
            y = torch.add(x, y)
        return (y,)

    return function


def _many_inputs(args: list[Any]) -> tuple[Any, ...]:
    xs = list(args)
    args.clear()
    return (torch._foreach_add(xs, 1.0)[0],)


def _many_outputs(count: int) -> Function:
    def function(args: list[Any]) -> tuple[Any, ...]:
        (x,) = args
        args.clear()
        return tuple(torch._foreach_add([x] * count, 1.0))

    return function


def main() -> None:
    table = Table(title="Host time of one replay, microseconds")
    for column in ("graph", "nodes", "touched per call", "us"):
        table.add_column(column)

    def row(name: str, partition: Any, graph: Any, inputs: list[list[Any]]) -> float:
        before = graph.nodes_touched, graph.replays
        us = _host_us(lambda i: partition(list(inputs[i % len(inputs)])) and None)
        touched = (graph.nodes_touched - before[0]) / (graph.replays - before[1])
        table.add_row(name, str(graph.nodes), f"{touched:.1f}", f"{us:.2f}")
        return us

    xs = [torch.randn(256, device="cuda") for _ in range(4)]
    for nodes in (1, 10, 100, 400):
        partition, graph = _capture(_chain(nodes), [xs[0]])
        same = row(f"chain of {nodes}, same input", partition, graph, [[xs[0]]])
        other = row(f"chain of {nodes}, other input each call", partition, graph, [[x] for x in xs])
        table.add_row(f"  per touched node of {nodes}", "", "", f"{(other - same) / nodes:.3f}")
    for count in (1, 16, 64, 256):
        many = [torch.randn(256, device="cuda") for _ in range(count)]
        partition, graph = _capture(_many_inputs, many)
        row(f"{count} inputs, same", partition, graph, [many])
    for count in (1, 16, 64, 256):
        partition, graph = _capture(_many_outputs(count), [xs[0]])
        row(f"{count} outputs", partition, graph, [[xs[0]]])
        partition, graph = _capture(_many_outputs(count), [xs[0]], tuple(range(count)))
        row(f"{count} outputs, saved for backward", partition, graph, [[xs[0]]])
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
