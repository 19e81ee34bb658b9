"""Many sequence lengths: 64 of them, each called three times in random order.

    python -m benchmarks.lengths

A graph per length would cost more than it gains. Prints, for Inductor and PyGraph, the seconds for all
calls after compilation, and the device memory at the end beside that of the longest length alone.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import pygraph
from benchmarks.workloads import WORKLOADS

_LENGTHS = range(40, 552, 8)
_TIMES = 3


def _device_mib() -> float:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


def _call(model: Callable[..., Any], length: int) -> None:
    with torch.no_grad():
        model(input_ids=torch.randint(0, 50000, (1, length), device="cuda"))


def _measure(module: torch.nn.Module, backend: str) -> dict[str, float]:
    order = list(_LENGTHS) * _TIMES
    random.Random(0).shuffle(order)
    result: dict[str, float] = {}
    for name, lengths in (("longest", [max(_LENGTHS)] * 6), ("all", order)):
        torch._dynamo.reset()
        pygraph.reset()
        gc.collect()
        torch.cuda.empty_cache()
        before = _device_mib()
        model = torch.compile(module, backend=backend, dynamic=True)
        for length in (48, 56):
            _call(model, length)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for length in lengths:
            _call(model, length)
        torch.cuda.synchronize()
        result[f"{name}_seconds"] = time.perf_counter() - start
        start = time.perf_counter()
        for length in lengths:
            _call(model, length)
        torch.cuda.synchronize()
        result[f"{name}_again_seconds"] = time.perf_counter() - start
        result[f"{name}_mib"] = _device_mib() - before
    rows = [row for row in pygraph.stats() if row.state == "captured"]
    result["graphs"] = len(rows)
    result["workspace_mib"] = max((row.workspace_bytes for row in rows), default=0) / 2**20
    return result


def main() -> int:
    if not torch.cuda.is_available():
        print("the benchmarks need an NVIDIA GPU", file=sys.stderr)
        return 1
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    workload = next(w for w in WORKLOADS if w.key == "gpt2/inference")
    module = workload.build().cuda().eval()
    for backend in ("inductor", "pygraph"):
        print(backend, json.dumps({k: round(v, 3) for k, v in _measure(module, backend).items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
