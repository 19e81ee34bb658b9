"""Compares two versions of PyGraph: each workload under both, in one run on one GPU.

    python -m benchmarks.versions /path/of/the/other/checkout [--only bert] [--lanes 9] [--together 9]

The other version is a checkout with its extension built; its Python package is found in its ``python``
folder or on ``--other-path``. This version runs twice: with the patches of PyTorch that are on by
default, and with all patches. All compile side by side; they are timed one after the other, the
versions of one workload next to each other. The table has this version's numbers as multiples of the
other's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lanes import Outcome, run_lanes
from benchmarks.rows import longest_first, parts
from benchmarks.run import choose
from benchmarks.suites import MODELS, AnyWorkload

_ROOT = Path(__file__).resolve().parents[1]
_FIELDS = ("us", "latency_us", "host_us", "peak_mib")
OTHER, NEW, ALL_PATCHES = "other", "new", "new, all patches"


def command(
    workload: AnyWorkload, suite: str, folder: Path, path: str, setting: Mapping[str, str]
) -> Callable[[str], list[str]]:
    """The worker of one version, for a token."""
    worker = [sys.executable, "-m", "benchmarks.run", "--suite", suite, "--worker", workload.key]
    worker += ["--variants", "pygraph", "--token"]
    variables = [f"{name}={value}" for name, value in {**setting, "PYTHONPATH": path}.items()]
    return lambda token: ["env", "-C", str(folder), *variables, *worker, token]


def rows_of(outcome: Outcome) -> list[dict[str, Any]]:
    """What a worker printed of PyGraph's variant."""
    lines = [line[4:] for line in outcome.output.splitlines() if line.startswith("ROW ")]
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [row for row in rows if row["backend"] == "pygraph"]


def table(found: Mapping[str, Mapping[str, dict[str, Any]]]) -> str:
    """found: rows by workload and version. Ratios to the other version; spreads are of the rounds."""
    head = ["workload", "version", "us", "spread", *(f"{field}, ratio" for field in _FIELDS)]
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    ratios: dict[str, list[float]] = {NEW: [], ALL_PATCHES: []}
    for workload, rows in found.items():
        for version, row in rows.items():
            cells = [workload, version, f"{row['us']:.1f}", f"{row['us_spread']:.3f}"]
            if version != OTHER and OTHER in rows:
                other = rows[OTHER]
                cells += [f"{row[field] / other[field]:.3f}" for field in _FIELDS]
                ratios[version].append(row["us"] / other["us"])
            lines.append(" | ".join(cells))
    for version, values in ratios.items():
        if values:
            worst, mean = max(values), statistics.geometric_mean(values)
            lines.append(f"\n{version}: geometric mean {mean:.3f}, worst {worst:.3f} of {len(values)}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Two versions of PyGraph side by side")
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument(
        "--other-path", default="", help="its PYTHONPATH, where it is installed elsewhere"
    )
    parser.add_argument("--suite", choices=MODELS, default="quick")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="workloads whose name contains this")
    parser.add_argument("--lanes", type=int, default=9, help="how many compile side by side")
    parser.add_argument("--together", type=int, default=9, help="workloads that compile before timing")
    parser.add_argument("--timeout", type=float, default=600, help="seconds per workload")
    parser.add_argument("--out", type=Path, default=Path("build/versions.json"))
    args = parser.parse_args(argv)
    other = args.other.resolve()
    paths = {
        OTHER: args.other_path or os.pathsep.join([str(other / "python"), str(other)]),
        NEW: os.pathsep.join([os.environ.get("PYTHONPATH", str(_ROOT / "python")), str(_ROOT)]),
    }
    versions: dict[str, tuple[Path, str, dict[str, str]]] = {
        OTHER: (other, paths[OTHER], {}),
        NEW: (_ROOT, paths[NEW], {}),
        ALL_PATCHES: (_ROOT, paths[NEW], {"PYGRAPH_PATCHES": "all"}),
    }
    found: dict[str, dict[str, dict[str, Any]]] = {}

    def keep(key: str, outcome: Outcome) -> None:
        workload, version = key.rsplit("@", 1)
        for row in rows_of(outcome):
            found.setdefault(workload, {})[version] = row
        if outcome.status != 0:
            print(f"{key}: ended with {outcome.status}", flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")

    known = {"rows": _known_rows(args.suite)}
    for part in parts(choose(args.suite, args.only), known, args.together):
        commands = {
            f"{workload.key}@{version}": command(workload, args.suite, *how)
            for workload in longest_first(part, known)
            for version, how in versions.items()
        }
        lanes = ["0"] * args.lanes
        run_lanes(commands, lanes, timeout=args.timeout, at_a_time=1, report=keep)
    print(table(found))


def _known_rows(suite: str) -> list[dict[str, Any]]:
    """Of an earlier run: which workloads take long to compile, and much memory."""
    name = "NVIDIA_H200.json" if suite == "quick" else f"NVIDIA_H200_{suite}.json"
    path = _ROOT / "benchmarks" / "results" / name
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


if __name__ == "__main__":
    main()
