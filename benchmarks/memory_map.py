"""The owners of device memory: what is alive in PyTorch's allocator after some calls of a workload.

    python -m benchmarks.memory_map --suite paper MTCG-I/inference [--variants inductor pygraph]

For each variant, one after the other in one process as in the benchmarks: the memory that its graphs
keep and take, then each segment of 1 MiB and more, with the memory alive in it by the line that
allocated it. A segment of which little is in use is memory that larger tensors cannot have.
"""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import pygraph
from benchmarks import device_memory
from benchmarks.measure import give_memory_back, make
from benchmarks.suites import MODELS
from benchmarks.variants import ABLATION, VARIANTS

_CALLS = 24
_MIB = 1 << 20
_HISTORY = 100_000  # allocations remembered


def describe(segments: Sequence[Mapping[str, Any]]) -> str:
    """The segments of a snapshot of PyTorch's allocator as text, the largest first."""
    lines = []
    for segment in sorted(segments, key=lambda s: -s["total_size"]):
        if segment["total_size"] < _MIB:
            continue
        used = segment["allocated_size"] / _MIB
        pool = "" if segment["segment_pool_id"] == (0, 0) else ", of a pool"
        lines.append(f"segment of {segment['total_size'] / _MIB:.0f} MiB, {used:.1f} in use{pool}")
        origins = collections.Counter[str]()
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                origins[_origin(block.get("frames", ()))] += block["size"]
        for origin, size in origins.most_common():
            lines.append(f"    {size / _MIB:10.3f} MiB  {origin}")
    return "\n".join(lines)


def _origin(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost line that asked for the memory, outside of PyTorch if there is one."""
    own = [frame for frame in frames if "/torch/" not in frame["filename"]] or list(frames)
    return f"{own[0]['filename']}:{own[0]['line']} in {own[0]['name']}" if own else "unknown"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Who keeps device memory")
    parser.add_argument("--suite", choices=MODELS, default="quick")
    parser.add_argument("--variants", nargs="+", default=["pygraph"], choices=(*VARIANTS, *ABLATION))
    parser.add_argument("workload", help='"name/mode"')
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("memory is counted on an NVIDIA GPU", file=sys.stderr)
        return 1
    workloads = {workload.key: workload for workload in MODELS[options.suite]}
    if options.workload not in workloads:
        parser.error(f"suite {options.suite!r} has no {options.workload!r}, but {', '.join(workloads)}")
    workload = workloads[options.workload]
    is_training = workload.mode == "training"
    torch.cuda.memory._record_memory_history("state", stacks="python", max_entries=_HISTORY)
    torch.manual_seed(0)
    module = workload.build().cuda().train(is_training)
    inputs = [workload.make_inputs(workload.batch) for _ in range(workload.input_sets)]
    with torch.set_grad_enabled(is_training):
        for name in options.variants:
            give_memory_back(module)
            before = device_memory.mark()
            variant = make(name, workload, module, inputs)
            for i in range(max(_CALLS, workload.warm_up)):
                variant.step(inputs[i % len(inputs)])
            device_memory.restart()
            for i in range(3):
                variant.step(inputs[i % len(inputs)])
            print(f"{workload.key}, {name}: {device_memory.used_since(before):.0f} MiB")
            after = device_memory.mark()
            for when, mark in (("before", before), ("after", after)):
                print(
                    f"  {when}: {mark.device:.0f} MiB on the device, {mark.reserved:.0f} PyTorch's,"
                    f" {mark.allocated:.0f} in use, {mark.kept:.0f} free and kept"
                )
            for graph in pygraph.stats():
                print(
                    f"  {graph.name}: {graph.state}, {graph.lanes} lanes, keeps"
                    f" {graph.workspace_bytes / _MIB:.1f} MiB, takes {graph.block_bytes / _MIB:.1f}"
                )
            print(describe(torch.cuda.memory._snapshot()["segments"]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
