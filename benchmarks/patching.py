"""A program that touches many nodes in each call: who patches them?

    python -m benchmarks.patching

An unrolled loop whose every step reads from the input, which is another tensor at each call, as a
data loader hands them out: 300 steps, two in one kernel. With Inductor's graphs, and with PyGraph:
patched by the host, as a trial decides, and patched by the device. Prints for each what a call takes
in us, in a row and synchronized (medians of blocks of calls in turns, with the smallest and the
largest), how many nodes it touches, what trials have measured, and whether the device patches them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pygraph import runtime
from pygraph.partition import device_patching
from pygraph.select import trial
from pygraph.select.trial import PATCHED_ON_DEVICE, Decision

_STEPS, _WIDTH, _INPUTS = 300, 64, 8
_ROUNDS, _CALLS, _WARM_UP = 15, 30, 140
_OURS = ("pygraph, patched by the host", "pygraph", "pygraph, patched by the device")
_VARIANTS: dict[str, dict[str, Any]] = {
    "inductor+graphs": {"mode": "reduce-overhead"},
    # With different options, so that none is taken for another one. In this order, because decisions
    # are kept on disk, and the last one's is made for it.
    **{
        name: {"backend": "pygraph", "options": {"pygraph.max_graphs": 10 + len(name)}}
        for name in _OURS
    },
}


@contextmanager
def _patched_by(name: str) -> Iterator[None]:
    """What is tried and selected in here is patched by whom the variant's name says."""
    least, choose = device_patching.MANY_NODES, trial.choose
    if name == _OURS[0]:
        device_patching.MANY_NODES = 1 << 30
    if name == _OURS[2]:
        trial.choose = lambda timings: (
            PATCHED_ON_DEVICE if PATCHED_ON_DEVICE in timings else choose(timings)
        )
    try:
        yield
    finally:
        device_patching.MANY_NODES, trial.choose = least, choose


def _loop(x: torch.Tensor) -> torch.Tensor:
    y = x[0]
    for i in range(_STEPS):
        y = torch.softmax(y * 2 + x[i % len(x)], i % 2)  # by turns, so that no more than two are fused
    return y


class _Variant:
    """One way to run the loop, compiled and warmed up."""

    def __init__(self, name: str, inputs: list[torch.Tensor]) -> None:
        self.name = name
        self.in_a_row: list[float] = []
        self.synchronized: list[float] = []
        self._inputs = inputs
        self._program: Callable[..., torch.Tensor] = torch.compile(
            _loop, dynamic=False, **_VARIANTS[name]
        )
        known = {id(entry) for entry in _entries()}
        with _patched_by(name):
            for i in range(_WARM_UP):
                self(i)
        entries = [entry for entry in _entries() if id(entry) not in known]
        self.graphs = [entry.graph for entry in entries if entry.graph is not None]
        decisions = [entry.selection.decision for entry in entries]
        self.trial_us = [_of_trial(decision) for decision in decisions if decision is not None]

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


def _entries() -> list[Any]:
    return [entry for partition in runtime.partitions for entry in partition.entries.values()]


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
    torch._dynamo.config.recompile_limit = len(_VARIANTS)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()  # no decision of an earlier run
    inputs = [torch.randn(16, _WIDTH, _WIDTH, device="cuda") for _ in range(_INPUTS)]
    variants = [_Variant(name, inputs) for name in _VARIANTS]
    expected = variants[0](0).clone()
    for turn in range(_ROUNDS):
        first = turn % len(variants)
        for variant in variants[first:] + variants[:first]:
            variant.time_block()
    for variant in variants:
        row = {
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
