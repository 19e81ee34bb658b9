"""Measures one workload: all variants in one process, timed in rotation.

First each variant is compiled and called a few times. That gives the memory that it adds to the model's
and, if it started with empty caches, its compile time. Then all variants are timed in rounds, one after
the other in each round, so that a change of the machine's speed affects all of them. Medians over the
rounds are kept, with the spread.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import re
import statistics
import tempfile
import time
import traceback
import unittest.mock
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch._inductor.utils
from torch.utils._pytree import tree_leaves

import pygraph
from benchmarks import device_memory
from benchmarks.turn import Turn
from benchmarks.variants import SAME_CODE, VARIANTS, HandMadeGraph, Row, Variant, names_for
from benchmarks.workloads import Inputs, Workload
from pygraph import runtime
from pygraph.partition.partition import Partition
from pygraph.report.profile import kernels_of, trace_call

_RECOMPILE_LIMIT = 8  # Dynamo's, per variant; all variants compile the same code
_FIRST_CALLS = 24  # compiling, recording, verifying and selecting happen in these
_ROUNDS = 6
_BLOCK_SECONDS = 0.06


def measure(
    workload: Workload,
    variants: tuple[str, ...] = VARIANTS,
    turn: Turn | None = None,
) -> list[Row]:
    """Measures the workload in this process. A variant that fails is left out, with a message.

    turn: among others that compile for the same GPU.
    """
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch._dynamo.config.recompile_limit = _RECOMPILE_LIMIT * len(variants)
    torch.manual_seed(0)
    baseline = device_memory.in_use_mib()
    module = workload.build().cuda()
    module.train(workload.mode == "training")
    inputs = [workload.make_inputs(workload.batch) for _ in range(workload.input_sets)]
    model_mib = device_memory.in_use_mib() - baseline
    # Entered once: a hand-made graph does not pay for it at each call either.
    with torch.set_grad_enabled(workload.mode == "training"):
        return _measure_all(workload, variants, turn or Turn(), module, inputs, model_mib)


def _measure_all(
    workload: Workload,
    variants: tuple[str, ...],
    turn: Turn,
    module: torch.nn.Module,
    inputs: list[Inputs],
    model_mib: float,
) -> list[Row]:
    Variant("eager", workload, module).step(inputs[0])  # loads the libraries
    ready: list[Variant] = []
    with tempfile.TemporaryDirectory() as caches:
        for name in names_for(workload, variants):
            try:
                with _cache_folder(caches, name), turn.tunes_alone():
                    ready.append(_prepare(name, workload, module, inputs, model_mib, turn))
            except Exception as error:
                print(f"  {workload.key}: {name} failed: {runtime.first_line(error)}", flush=True)
                traceback.print_exc()
        gc.collect()
        torch.cuda.empty_cache()  # those that still compile need it
        turn.wait_until_all_have_compiled()
        _time_in_turns(ready, inputs)
    _compare_results(ready, inputs)
    for variant in ready:
        variant.row.in_graphs = _share_in_graphs(variant, inputs[0])
        variant.row.copied_bytes = _copied_bytes(variant, inputs[0])
    for graph in pygraph.stats():
        if graph.state == "refused":
            print(f"  {workload.key}: {graph.name} uncaptured: {graph.reason}", flush=True)
    return [variant.row for variant in ready]


def make(name: str, workload: Workload, module: torch.nn.Module, inputs: list[Inputs]) -> Variant:
    """The variant of this name, not called yet but for a hand-made graph."""
    if name == "hand-made graph":
        return HandMadeGraph(workload, module, inputs[0])
    return Variant(name, workload, module)


def _prepare(
    name: str,
    workload: Workload,
    module: torch.nn.Module,
    inputs: list[Inputs],
    model_mib: float,
    turn: Turn,
) -> Variant:
    """A variant that is compiled and warm, its compile time and memory noted."""
    give_memory_back(module)
    before = device_memory.mark()
    others = set(runtime.partitions)
    start, waited = time.perf_counter(), turn.waited
    with device_memory.Peak() as peak:
        variant = make(name, workload, module, inputs)
        variant.step(inputs[0])
        with turn.alone():
            for i in range(1, _FIRST_CALLS):
                variant.step(inputs[i % len(inputs)])
            torch.cuda.synchronize()
    row = variant.row
    row.compile_s = time.perf_counter() - start - (turn.waited - waited)
    row.compile_peak_mib = model_mib + device_memory.used_since(before, peak)
    with turn.alone():
        for i in range(max(0, workload.warm_up - _FIRST_CALLS)):
            variant.step(inputs[i % len(inputs)])
        device_memory.restart()
        start = time.perf_counter()
        for i in range(3):
            variant.step(inputs[i % len(inputs)])
        row.peak_mib = model_mib + device_memory.used_since(before)
        row.compile_s -= (time.perf_counter() - start) / 3 * _FIRST_CALLS
    if name in SAME_CODE:
        row.compile_s = None  # found much of it compiled
    row.graphs = _states(cast("set[Partition]", set(runtime.partitions) - others))
    return variant


def _states(partitions: set[Partition]) -> dict[str, int]:
    entries = [entry for partition in partitions for entry in partition.entries.values()]
    return dict(collections.Counter(entry.state.value for entry in entries))


def give_memory_back(module: torch.nn.Module) -> None:
    """What is kept beyond the module, its inputs and earlier variants: gradients, caches."""
    module.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def _cache_folder(caches: str, name: str) -> Iterator[None]:
    """Inductor's caches in a folder of the variant's own, or of the one that compiles the same code."""
    owner = SAME_CODE.get(name, name)
    folder = os.path.join(caches, re.sub(r"\W", "_", owner))  # compilers are called with it
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
    torch._inductor.utils.clear_caches()
    try:
        yield
    finally:
        if before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def _time_in_turns(variants: list[Variant], inputs: list[Inputs]) -> None:
    throughput: dict[str, list[float]] = {v.name: [] for v in variants}
    latency: dict[str, list[float]] = {v.name: [] for v in variants}
    host: dict[str, list[float]] = {v.name: [] for v in variants}
    calls = {v.name: _calls_per_block(v, inputs) for v in variants}
    gc.collect()
    gc.disable()
    for turn in range(_ROUNDS):
        first = turn % len(variants)  # nobody always runs after the same one
        for variant in variants[first:] + variants[:first]:
            count = calls[variant.name]
            for i in range(3):
                variant.step(inputs[i % len(inputs)])
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(count):
                variant.step(inputs[i % len(inputs)])
            issued = time.perf_counter()
            torch.cuda.synchronize()
            throughput[variant.name].append((time.perf_counter() - start) / count * 1e6)
            host[variant.name].append((issued - start) / count * 1e6)
            start = time.perf_counter()
            for i in range(max(1, count // 2)):
                variant.step(inputs[i % len(inputs)])
                torch.cuda.synchronize()
            latency[variant.name].append((time.perf_counter() - start) / max(1, count // 2) * 1e6)
        gc.collect()
    gc.enable()
    for variant in variants:
        times = throughput[variant.name]
        variant.row.us = statistics.median(times)
        variant.row.us_spread = (max(times) - min(times)) / variant.row.us
        variant.row.latency_us = statistics.median(latency[variant.name])
        variant.row.host_us = statistics.median(host[variant.name])


def _calls_per_block(variant: Variant, inputs: list[Inputs]) -> int:
    start = time.perf_counter()
    for i in range(5):
        variant.step(inputs[i % len(inputs)])
    torch.cuda.synchronize()
    return max(4, min(500, int(_BLOCK_SECONDS / ((time.perf_counter() - start) / 5))))


def _share_in_graphs(variant: Variant, inputs: Inputs) -> float:
    """The larger share of two calls. Two are made before: an audit and its thorough check, which runs
    under no profiler, so that a graph that differs from run to run would stay uncaptured in both."""
    for _ in range(2):
        variant.step(inputs)
    calls = [kernels_of(trace_call(lambda: variant.step(inputs))) for _ in range(2)]
    shares = [sum(k.launch is not None for k in kernels) / len(kernels) for kernels in calls if kernels]
    return max(shares, default=float("nan"))


def _copied_bytes(variant: Variant, inputs: Inputs) -> int:
    """What one call copies into graphs at fixed addresses. CUDAGraph Trees do it by this operator, and
    nobody else."""
    copied = 0
    original = torch._foreach_copy_

    def counting_copy(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
        nonlocal copied
        copied += sum(tensor.nbytes for tensor in source)
        original(to, source)

    with unittest.mock.patch.object(torch, "_foreach_copy_", counting_copy):
        variant.step(inputs)
    return copied


def _compare_results(variants: list[Variant], inputs: list[Inputs]) -> None:
    """The first result of the step, from equal seeds, against uncaptured Inductor's."""
    results: dict[str, torch.Tensor] = {}
    for variant in variants:
        torch.manual_seed(1234)
        if variant.name != "hand-made graph":
            results[variant.name] = _first_tensor(variant.step(inputs[0])).detach().float().clone()
    reference = results.get("inductor")
    for variant in variants:
        result = results.get(variant.name)
        if reference is None or result is None or result.shape != reference.shape:
            variant.row.rel_err = float("nan")
            continue
        scale = reference.abs().max().clamp_min(1e-30)
        variant.row.rel_err = float((result - reference).abs().max() / scale)


def _first_tensor(output: Any) -> torch.Tensor:
    is_mapping = hasattr(output, "keys") and hasattr(output, "values")  # transformers' outputs
    values = list(output.values()) if is_mapping else output
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return max(tensors, key=lambda t: t.numel())
