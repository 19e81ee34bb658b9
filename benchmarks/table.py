"""The results as a Markdown table, the one that the README shows."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

_COLUMNS = ("inductor", "inductor+graphs", "pygraph", "hand-made graph")


def markdown(document: dict[str, Any]) -> str:
    """One line per workload: microseconds per call, ratios, peak memory."""
    machine = document["machine"]
    lines = [
        f"{machine['gpu']}, driver {machine['driver']}, PyTorch {machine['torch']}, "
        f"commit {document['commit']}, {machine['date']}. Microseconds per call "
        "(latency with a synchronize per call), then device memory in MiB.",
        "",
        "| Workload | Batch | Inductor | + graphs | PyGraph | hand-made graph "
        "| speed-up over the better of both | MiB: Inductor | + graphs | PyGraph "
        "| kernels in graphs: + graphs | PyGraph | Difference |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in document["rows"]:
        groups.setdefault((row["workload"], row["mode"]), {})[row["backend"]] = row
    for (workload, mode), rows in groups.items():
        if "pygraph" not in rows:
            continue
        own = rows["pygraph"]
        times = [
            f"{rows[c]['us']:.0f} ({rows[c]['latency_us']:.0f})" if c in rows else "-" for c in _COLUMNS
        ]
        baselines = [rows[c]["us"] for c in _COLUMNS[:2] if c in rows]
        gain = f"{min(baselines) / own['us']:.2f}" if baselines else "-"
        memory = [_mib(rows.get(c)) for c in _COLUMNS[:3]]
        shares = [_share(rows.get(c)) for c in _COLUMNS[1:3]]
        error = own["rel_err"]
        lines.append(
            f"| {workload}, {mode} | {own['batch']} | {' | '.join(times)} | {gain} "
            f"| {' | '.join(memory)} | {' | '.join(shares)} | {'0' if error == 0 else f'{error:.1e}'} |"
        )
    return "\n".join(lines) + "\n"


def _mib(row: dict[str, Any] | None) -> str:
    return "-" if row is None or row["peak_mib"] is None else f"{row['peak_mib']:.0f}"


def _share(row: dict[str, Any] | None) -> str:
    return "-" if row is None or row.get("in_graphs") is None else f"{row['in_graphs']:.1%}"


if __name__ == "__main__":
    print(markdown(json.loads(pathlib.Path(sys.argv[1]).read_text())), end="")
