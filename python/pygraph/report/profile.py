"""A call under PyTorch's profiler: which kernels ran inside graphs, and for how long."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pygraph.report.explanation import Share, StripPart


@dataclasses.dataclass(frozen=True)
class Kernel:
    name: str
    us: float
    launch: int | None  # number of the graph launch it belongs to, or None for a plain launch


def trace_call(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """The events of the chrome trace of one call; without kernels where tracing is not permitted."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return list(json.loads(path.read_text("utf-8"))["traceEvents"])


def kernels_of(events: Iterable[dict[str, Any]]) -> list[Kernel]:
    """Kernels in the order of their start. One that no traced call has launched came from a graph.

    (PyTorch's profiler traces launches of graphs by the runtime, but not by the driver.)
    """
    launches: dict[int, str] = {}
    kernels: list[tuple[float, dict[str, Any]]] = []
    for event in events:
        correlation = event.get("args", {}).get("correlation")
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and correlation is not None:
            launches[correlation] = event["name"]
        elif event.get("cat") == "kernel":
            kernels.append((event["ts"], event))
    result = []
    for _, event in sorted(kernels, key=lambda item: item[0]):
        correlation = event["args"].get("correlation")
        launched_by = launches.get(correlation, "GraphLaunch")
        is_graph = "GraphLaunch" in launched_by
        result.append(Kernel(event["name"], float(event["dur"]), correlation if is_graph else None))
    return result


def shares(kernels: list[Kernel]) -> tuple[Share, ...]:
    inside = [kernel for kernel in kernels if kernel.launch is not None]
    return (
        Share("kernels", len(inside), len(kernels)),
        Share("us", sum(k.us for k in inside), sum(k.us for k in kernels)),
    )


def strip(kernels: list[Kernel]) -> list[StripPart]:
    """One part per graph launch and per run of plain launches; widths in microseconds."""
    runs: list[list[Kernel]] = []
    for kernel in kernels:
        if runs and runs[-1][-1].launch == kernel.launch:
            runs[-1].append(kernel)
        else:
            runs.append([kernel])
    return [
        StripPart(
            "gap" if run[0].launch is None else "graph",
            f"{len(run)} kernels: {run[0].name[:60]}" if len(run) > 1 else run[0].name[:60],
            sum(kernel.us for kernel in run),
        )
        for run in runs
    ]
