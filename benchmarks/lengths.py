"""Many sequence lengths: 64 of them, each called three times in random order.

    python -m benchmarks.lengths

A graph per length would cost more than it gains. For Inductor and PyGraph, prints the seconds for all
calls after compilation (six alternating rounds, each from the start), and the device memory added.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import pygraph
from benchmarks.device_memory import device_mib
from benchmarks.workloads import WORKLOADS

_LENGTHS = range(40, 552, 8)
_TIMES = 3
_ROUNDS = 6


def _call(model: Callable[..., Any], length: int) -> None:
    with torch.no_grad():
        model(input_ids=torch.randint(0, 50000, (1, length), device="cuda"))


class _Backend:
    """One way to run the module on many lengths, with what was measured of it."""

    def __init__(self, module: torch.nn.Module, name: str, variant: int) -> None:
        self.name = name
        self.result: dict[str, float] = {}
        self._seconds: list[float] = []
        # Dynamo counts what all variants compile of the same code together.
        torch._dynamo.config.recompile_limit = 8 * (variant + 1)
        self._model = torch.compile(module, backend=name, dynamic=True)

    def compile(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        before = device_mib()
        for length in (48, 56, max(_LENGTHS)):
            _call(self._model, length)
        self.result["mib"] = device_mib() - before

    def run(self, lengths: list[int]) -> None:
        """Calls the compiled model on all lengths, as if for the first times."""
        pygraph.reset()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for length in lengths:
            _call(self._model, length)
        torch.cuda.synchronize()
        self._seconds.append(time.perf_counter() - start)
        rows = [row for row in pygraph.stats() if row.state == "captured"]
        self.result |= {
            "seconds": statistics.median(self._seconds),
            "smallest": min(self._seconds),
            "largest": max(self._seconds),
            "graphs": len(rows),
            "workspace_mib": max((row.workspace_bytes for row in rows), default=0) / 2**20,
        }


def main() -> int:
    if not torch.cuda.is_available():
        print("the benchmarks need an NVIDIA GPU", file=sys.stderr)
        return 1
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    workload = next(w for w in WORKLOADS if w.key == "gpt2/inference")
    module = workload.build().cuda().eval()
    lengths = list(_LENGTHS) * _TIMES
    random.Random(0).shuffle(lengths)
    backends = [_Backend(module, name, i) for i, name in enumerate(("inductor", "pygraph"))]
    for backend in backends:
        backend.compile()
    for turn in range(_ROUNDS):
        for backend in backends[turn % 2 :] + backends[: turn % 2]:
            backend.run(lengths)
    for backend in backends:
        print(backend.name, json.dumps({k: round(v, 3) for k, v in backend.result.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
