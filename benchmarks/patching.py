"""A program that touches many nodes in each call: who patches them?

    python -m benchmarks.patching

An unrolled loop whose every step reads from the input, which is another tensor at each call, as a data
loader hands them out: 100 and 300 steps of one small kernel each. With Inductor, Inductor with graphs,
PyGraph with its nodes patched by the host, and PyGraph as it is. Prints for each microseconds per call,
in a row and synchronized (medians of blocks of calls in turns, with the smallest and the largest), how
many nodes were touched per call, what the trials have measured, and whether the device patches them.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from pygraph import device_patching, runtime
from pygraph.selection import Decision

_STEPS = (100, 300)
_WIDTH, _INPUTS = 64, 8
_ROUNDS, _CALLS, _WARM_UP = 15, 30, 140
_VARIANTS: dict[str, dict[str, Any]] = {
    "inductor": {},
    "inductor+graphs": {"mode": "reduce-overhead"},
    # With an option, so that it is not taken for the other one.
    "pygraph, patched by the host": {"backend": "pygraph", "options": {"pygraph.select": "auto"}},
    "pygraph": {"backend": "pygraph"},
}

Program = Callable[[torch.Tensor], torch.Tensor]


def _loop(steps: int) -> Program:
    def loop(x: torch.Tensor) -> torch.Tensor:
        y = x[0]
        for i in range(steps):
            y = torch.softmax(y * 2 + x[i % len(x)], i % 2)  # by turns, so that none are fused
        return y

    return loop


class _Variant:
    """One way to run the loop, compiled and warmed up."""

    def __init__(self, name: str, steps: int, inputs: list[torch.Tensor]) -> None:
        self.name = name
        self.in_a_row: list[float] = []
        self.synchronized: list[float] = []
        self._inputs = inputs
        self._program = torch.compile(_loop(steps), **_VARIANTS[name])
        before = device_patching.MANY_NODES
        if name.endswith("host"):
            device_patching.MANY_NODES = 1 << 30
        known = set(runtime.partitions)
        for i in range(_WARM_UP):
            self(i)
        device_patching.MANY_NODES = before
        partitions = set(runtime.partitions) - known
        entries = [entry for partition in partitions for entry in partition.entries.values()]
        self.graphs = [entry.graph for entry in entries if entry.graph is not None]
        decisions = [entry.decision for entry in entries if entry.decision is not None]
        self.trial_us = [_of_trial(decision) for decision in decisions]

    def __call__(self, i: int) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return self._program(self._inputs[i % len(self._inputs)])

    def time_block(self) -> None:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(_CALLS):
            self(i)
        torch.cuda.synchronize()
        self.in_a_row.append((time.perf_counter() - start) / _CALLS * 1e6)
        start = time.perf_counter()
        for i in range(_CALLS):
            self(i)
            torch.cuda.synchronize()
        self.synchronized.append((time.perf_counter() - start) / _CALLS * 1e6)


def _of_trial(decision: Decision) -> dict[str, list[float]]:
    """Microseconds of each variant: of the host, of the GPU, and of the latency."""
    return {
        name: [round(seconds * 1e6, 1) for seconds in (times.host, times.device, times.latency)]
        for name, times in decision.timings.items()
    }


def _spread(times: list[float]) -> list[float]:
    return [round(of(times), 1) for of in (min, statistics.median, max)]


@torch.no_grad()
def main() -> int:
    if not torch.cuda.is_available():
        print("the benchmarks need an NVIDIA GPU", file=sys.stderr)
        return 1
    torch._dynamo.config.recompile_limit = len(_VARIANTS) * len(_STEPS)
    inputs = [torch.randn(16, _WIDTH, _WIDTH, device="cuda") for _ in range(_INPUTS)]
    for steps in _STEPS:
        variants = [_Variant(name, steps, inputs) for name in _VARIANTS]
        expected = variants[0](0)
        for turn in range(_ROUNDS):
            first = turn % len(variants)
            for variant in variants[first:] + variants[:first]:
                variant.time_block()
        for variant in variants:
            row = {
                "steps": steps,
                "variant": variant.name,
                "in_a_row_us": _spread(variant.in_a_row),
                "synchronized_us": _spread(variant.synchronized),
                "touched": [round(g.nodes_touched / g.replays) for g in variant.graphs],
                "trial_us": variant.trial_us,
                "on_device": [g.is_patched_on_device for g in variant.graphs],
                "rel_err": float((variant(0) - expected).abs().max() / expected.abs().max()),
            }
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
