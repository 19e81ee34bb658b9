"""Runs the benchmark suite and writes benchmarks/results/<gpu>.json and a Markdown table.

    python -m benchmarks.run [--only NAME ...] [--variants V ...] [--timeout SECONDS] [--out FOLDER]

Each workload runs in its own process, with a time limit. Rows of workloads that were measured before
and not now are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import platform
import subprocess
import sys
import time

import torch
from rich.console import Console

from benchmarks.measure import VARIANTS, measure
from benchmarks.table import markdown
from benchmarks.workloads import WORKLOADS

_FOLDER = pathlib.Path(__file__).parent / "results"


def _machine() -> dict[str, str]:
    properties = torch.cuda.get_device_properties(0)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "gpu": properties.name,
        "gpu_memory_gib": f"{properties.total_memory / 2**30:.0f}",
        "driver": driver.splitlines()[0] if driver else "unknown",
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": str(torch.get_num_threads()),
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str:
    result = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or "unknown"


def _run_worker(key: str, variants: list[str], timeout: float) -> list[dict[str, object]]:
    command = [sys.executable, "-m", "benchmarks.run", "--worker", key, "--variants", *variants]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        print(f"  {key}: no result within {timeout:.0f} s")
        return []
    rows = []
    for line in done.stdout.splitlines():
        if line.startswith("ROW "):
            rows.append(json.loads(line[4:]))
        elif line.strip():
            print(line)
    if done.returncode != 0:
        print(f"  {key}: the process ended with {done.returncode}")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="PyGraph's benchmark suite")
    keys = [workload.key for workload in WORKLOADS]
    parser.add_argument("--only", nargs="+", default=None, help=f"of: {', '.join(keys)}")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--timeout", type=float, default=600, help="seconds per workload")
    parser.add_argument("--out", type=pathlib.Path, default=_FOLDER, help="folder for results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("the benchmarks need an NVIDIA GPU", file=sys.stderr)
        return 1
    if options.worker:
        workload = next(w for w in WORKLOADS if w.key == options.worker)
        for row in measure(workload, tuple(options.variants)):
            print("ROW " + json.dumps(dataclasses.asdict(row)), flush=True)
        return 0

    chosen = [key for key in keys if options.only is None or any(o in key for o in options.only)]
    machine = _machine()
    path = options.out / f"{machine['gpu'].replace(' ', '_')}.json"
    document = json.loads(path.read_text()) if path.exists() else {"rows": []}
    document |= {"machine": machine, "commit": _commit()}
    console = Console()
    for number, key in enumerate(chosen, 1):
        started = time.perf_counter()
        console.print(f"[{number}/{len(chosen)}] {key} ...", highlight=False)
        rows = _run_worker(key, options.variants, options.timeout)
        name, mode = key.split("/")
        document["rows"] = [
            row for row in document["rows"] if (row["workload"], row["mode"]) != (name, mode)
        ] + [
            {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
            | {"commit": document["commit"]}
            for row in rows
        ]
        options.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")
        for row in rows:
            print(
                f"    {row['backend']:<16} {row['us']:>10.1f} us  latency {row['latency_us']:>10.1f}"
                f"  host {row['host_us']:>9.1f}  peak {row['peak_mib']:>8.0f} MiB"
                f"  compile {row['compile_s']:>5.1f} s {row['compile_peak_mib']:>8.0f} MiB"
                f"  in graphs {row['in_graphs']:.3f}  err {row['rel_err']}"
            )
        console.print(f"    ({time.perf_counter() - started:.0f} s)", highlight=False)
    table = markdown(document)
    path.with_suffix(".md").write_text(table)
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
