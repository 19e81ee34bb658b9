"""The results of whole steps as Markdown tables."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.steps.variants import BRANCHES, GRAPHED, HAND_MADE, VARIANTS
from benchmarks.steps.workloads import STEPS

HEADINGS = {
    "eager": "eager",
    "inductor": "Inductor",
    "inductor+graphs": "+ graphs",
    "pygraph": "PyGraph",
    "pygraph, pieces": "+ optimizer",
    "pygraph.graph eager": "`pygraph.graph`, eager model",
    "pygraph.graph": "`pygraph.graph`",
    "pygraph.graph eager, branches": "`pygraph.graph`, branches, eager model",
    "pygraph.graph, branches": "`pygraph.graph`, branches",
    "hand-made eager": "by hand, eager model",
    "hand-made": "by hand",
}
_PLAIN = ("eager", "inductor", "inductor+graphs")
_OWN = (*GRAPHED, *BRANCHES)
_Rows = dict[str, dict[str, Any]]


def rows_by_workload(document: dict[str, Any]) -> dict[str, _Rows]:
    """In the suite's order."""
    found: dict[str, _Rows] = {workload.name: {} for workload in STEPS}
    for row in document["rows"]:
        found.setdefault(row["workload"], {})[row["variant"]] = row
    return {workload: rows for workload, rows in found.items() if rows}


def best(rows: _Rows, names: tuple[str, ...]) -> float | None:
    """The smallest time per step among the variants; None where none was measured."""
    times = [rows[name]["us"] for name in names if rows.get(name, {}).get("us")]
    return min(times, default=None)


def ratio(of: float | None, over: float | None) -> float | None:
    return None if of is None or over is None else of / over


def tables(document: dict[str, Any]) -> str:
    """Times, then host times, memory and differences, then what failed."""
    by_workload = rows_by_workload(document)
    present = {name for rows in by_workload.values() for name in rows}
    names = [name for name in VARIANTS if name in present]
    parts = [
        _caption(document),
        _times(by_workload, names),
        "Microseconds of the host per step; in brackets the rounds in which no CPU stayed quiet:",
        _table(by_workload, names, _host),
        "Device memory in MiB:",
        _table(by_workload, names, lambda row: _number(row["peak_mib"])),
        "Distance from the eager steps (of the eager steps: from a second run of them):",
        _table(by_workload, names, lambda row: _error(row["rel_err"])),
        _failures(by_workload, names),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _caption(document: dict[str, Any]) -> str:
    machine = document["machine"]
    return (
        f"{machine['gpu']}, driver {machine['driver']}, PyTorch {machine['torch']}, "
        f"commit {document['commit']}, {machine['date']}. Microseconds per step, steps in a row; in "
        "brackets half the spread of the rounds, where it is over 5 %. "
        "Speed-up: of the faster `pygraph.graph` over the fastest of eager, Inductor and + graphs. "
        "To by hand: its time over that of the faster graph made by hand."
    )


def _times(by_workload: dict[str, _Rows], names: list[str]) -> str:
    headings = ["Workload", "Batch", *(HEADINGS[name] for name in names), "Speed-up", "To by hand"]
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for workload, rows in by_workload.items():
        own = best(rows, _OWN)
        cells = [
            workload,
            str(next(iter(rows.values()))["batch"]),
            *(_time(rows.get(name)) for name in names),
            _ratio(ratio(best(rows, _PLAIN), own)),
            _ratio(ratio(own, best(rows, HAND_MADE))),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    gains = [ratio(best(rows, _PLAIN), best(rows, _OWN)) for rows in by_workload.values()]
    known = [gain for gain in gains if gain is not None]
    if known:
        mean = math.exp(sum(map(math.log, known)) / len(known))
        lines += ["", f"Geometric mean of the speed-up, {len(known)} workloads: {mean:.2f}."]
    return "\n".join(lines)


def _table(by_workload: dict[str, _Rows], names: list[str], cell: Any) -> str:
    headings = ["Workload", *(HEADINGS[name] for name in names)]
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for workload, rows in by_workload.items():
        cells = [cell(rows[name]) if name in rows else "-" for name in names]
        lines.append(f"| {' | '.join([workload, *cells])} |")
    return "\n".join(lines)


def _failures(by_workload: dict[str, _Rows], names: list[str]) -> str:
    """Variants that failed, and why PyGraph's have no graph."""
    lines = []
    for workload, rows in by_workload.items():
        for name in (name for name in names if name in rows):
            error = rows[name].get("error")
            lines += [f"- {workload}, {HEADINGS[name]}: failed: {error}"] if error else []
            lines += [f"- {workload}, {HEADINGS[name]}: {r}" for r in rows[name].get("reasons", [])]
    return "\n".join(lines)


def _time(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    if row["us"] is None:
        return "failed"
    spread = row["us_spread"] / 2
    return f"{row['us']:.0f}" + (f" (± {spread:.0%})" if spread > 0.05 else "")


def _host(row: dict[str, Any]) -> str:
    disturbed = row.get("disturbed")
    return _number(row["host_us"]) + (f" ({disturbed})" if disturbed else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _error(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"
