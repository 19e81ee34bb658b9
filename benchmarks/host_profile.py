"""Where a compiled program's time on the host goes, to compare releases of PyTorch.

    python -m benchmarks.host_profile DALLE2 MTCG-I [--backend inductor] [--calls 10]

Run it with each release on one machine. Takes workloads of the quick and of the paper's suite. Prints
for each, per call:

* microseconds, calls in a row, and of the caller's thread until a call returns (medians of rounds);
* from PyTorch's profiler: kernels and their time on the GPU, launches and their time on the host, and
  operators that the host dispatches;
* from cProfile: the share of the host's time by kind of code. cProfile makes Python's functions slower
  than C++, so shares are for a comparison only. The backward runs in the caller's thread here.
"""

from __future__ import annotations

import argparse
import collections
import cProfile
import gc
import json
import os
import pstats
import re
import statistics
import time
from collections.abc import Sequence
from typing import Any, cast

import torch

from benchmarks.measure import make
from benchmarks.suites import MODELS
from benchmarks.variants import VARIANTS, Variant
from benchmarks.workloads import Inputs, Workload
from pygraph.report.profile import kernels_of, trace_call

_WARM_UP, _ROUNDS = 24, 7
# The first pattern that a function's file, or its name if it is built in, matches.
_KINDS = (
    ("Triton's launches", r"triton|static_cuda_launcher|<string>|launch"),
    ("allocation, views", r"empty_strided|reinterpret_tensor|as_strided"),
    ("Dynamo", r"torch/_dynamo|_dynamo\.eval_frame"),
    ("AOTAutograd, Inductor", r"torch/(_functorch|_inductor|_higher_order_ops)|torch/autograd"),
    ("operators", r"torch\._ops|method torch\.|TensorBase|_VariableFunctions|torch/_ops|run_backward"),
    ("generated code", r"torchinductor|/[a-z0-9]{2}/c[a-z0-9]{40,}\.py"),
    ("other code of PyTorch", r"/torch/"),
)


def _kind_of(function: tuple[str, int, str]) -> str:
    file, _, name = function
    text = name if file == "~" else file
    return next(
        (kind for kind, pattern in _KINDS if re.search(pattern, text)), "the program's, Python's"
    )


def _times(variant: Variant, inputs: Sequence[Inputs], calls: int) -> dict[str, float]:
    in_row, host = [], []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(calls):
            variant.step(inputs[i % len(inputs)])
        host.append((time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize()
        in_row.append((time.perf_counter() - start) / calls * 1e6)
    spread = (max(in_row) - min(in_row)) / statistics.median(in_row)
    return {"us": statistics.median(in_row), "us_spread": spread, "host_us": statistics.median(host)}


def _traced(variant: Variant, inputs: Inputs) -> dict[str, float]:
    events = trace_call(lambda: variant.step(inputs))
    kernels = kernels_of(events)
    launches = [e for e in events if e.get("cat", "").startswith("cuda_") and "aunch" in e["name"]]
    return {
        "kernels": len(kernels),
        "gpu_us": sum(kernel.us for kernel in kernels),
        "launches": len(launches),
        "launch_us": sum(e["dur"] for e in launches),
        "operators": sum(e.get("cat") == "cpu_op" for e in events),
    }


def _shares(variant: Variant, inputs: Sequence[Inputs], calls: int) -> dict[str, float]:
    profiler = cProfile.Profile()
    profiler.enable()
    for i in range(calls):
        variant.step(inputs[i % len(inputs)])
    profiler.disable()
    torch.cuda.synchronize()
    seconds: dict[str, float] = collections.defaultdict(float)
    functions = cast("dict[tuple[str, int, str], Any]", vars(pstats.Stats(profiler))["stats"])
    for function, (_, _, own, _, _) in functions.items():
        seconds[_kind_of(function)] += own
    total = sum(seconds.values())
    return {kind: share / total for kind, share in sorted(seconds.items(), key=lambda x: -x[1])}


def measure(workload: Workload, backend: str, calls: int) -> dict[str, Any]:
    """One workload's figures, by their names. Compiles it in this process."""
    torch.manual_seed(0)
    module = workload.build().cuda().train(workload.mode == "training")
    inputs = [workload.make_inputs(workload.batch) for _ in range(workload.input_sets)]
    is_training = workload.mode == "training"
    with torch.set_grad_enabled(is_training), torch.autograd.set_multithreading_enabled(False):
        variant = make(backend, workload, module, inputs)
        for i in range(max(_WARM_UP, workload.warm_up)):
            variant.step(inputs[i % len(inputs)])
        gc.collect()
        gc.disable()
        try:
            found = {**_times(variant, inputs, calls), **_traced(variant, inputs[0])}
            return {**found, "shares": _shares(variant, inputs, calls)}
        finally:
            gc.enable()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    known = {workload.key: workload for suite in MODELS.values() for workload in suite}
    parser.add_argument("workloads", nargs="+", help="the beginning of a name")
    parser.add_argument("--backend", default="inductor", choices=VARIANTS)
    parser.add_argument("--calls", type=int, default=10)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}, {os.cpu_count()} cores")
    for key, workload in known.items():
        if any(key.startswith(name) for name in args.workloads):
            torch._dynamo.reset()
            row = measure(workload, args.backend, args.calls)
            print(json.dumps({"workload": key, "backend": args.backend, **row}), flush=True)


if __name__ == "__main__":
    main()
