"""The results as a Markdown table, the one that the README shows, and as a page with figures."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from html import escape
from typing import Any

_COLUMNS = ("inductor", "inductor+graphs", "pygraph", "hand-made graph")
WITHOUT_POLYFILLS = "pygraph, no polyfills"  # PyGraph's row with the program's own library functions
_HEADINGS = (
    *("Workload", "Batch", "Inductor", "+ graphs", "PyGraph", "hand-made graph"),
    "speed-up over the better of both",
    *("MiB: Inductor", "+ graphs", "PyGraph"),
    *("kernels in graphs: + graphs", "PyGraph", "Difference"),
)


@dataclasses.dataclass(frozen=True)
class Group:
    """The rows of one workload, by backend."""

    workload: str
    mode: str
    rows: dict[str, dict[str, Any]]

    @property
    def label(self) -> str:
        return self.workload if self.mode == "inference" else f"{self.workload}, {self.mode}"


def groups_of(document: dict[str, Any]) -> list[Group]:
    """The document's rows by workload and mode, in their order; only those that PyGraph ran."""
    groups: dict[tuple[str, str], Group] = {}
    for row in document["rows"]:
        key = (row["workload"], row["mode"])
        groups.setdefault(key, Group(*key, {})).rows[row["backend"]] = row
    return [group for group in groups.values() if "pygraph" in group.rows]


def _lines_of(document: dict[str, Any]) -> list[Group]:
    """A line for each group, and one more where it was measured without polyfills."""
    lines = []
    for group in groups_of(document):
        lines.append(group)
        if WITHOUT_POLYFILLS in group.rows:
            rows = group.rows | {"pygraph": group.rows[WITHOUT_POLYFILLS]}
            lines.append(Group(f"{group.workload} without polyfills", group.mode, rows))
    return lines


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def summary(document: dict[str, Any]) -> str:
    """One sentence: geometric means over Inductor, and how many workloads lose."""
    groups = [g for g in groups_of(document) if {"inductor", "inductor+graphs"} <= g.rows.keys()]
    if not groups:
        return ""

    def gains(backend: str) -> list[float]:
        return [group.rows["inductor"]["us"] / group.rows[backend]["us"] for group in groups]

    own, graphs = gains("pygraph"), gains("inductor+graphs")
    return (
        f"{len(groups)} workloads; geometric-mean speed-up over Inductor: PyGraph "
        f"{geometric_mean(own):.2f}, Inductor with graphs {geometric_mean(graphs):.2f}; slower than "
        f"Inductor by 3 % or more: {sum(x < 0.97 for x in own)} and {sum(x < 0.97 for x in graphs)}."
    )


def markdown(document: dict[str, Any]) -> str:
    """One line per workload: microseconds per call, ratios, memory, share in graphs."""
    lines = [
        _caption(document),
        "",
        f"| {' | '.join(_HEADINGS)} |",
        "|" + "---|" * len(_HEADINGS),
        *(f"| {' | '.join(_cells(group))} |" for group in _lines_of(document)),
        "",
        summary(document),
    ]
    return "\n".join(lines) + "\n"


def page(document: dict[str, Any], figures: Sequence[pathlib.Path]) -> str:
    """One self-contained HTML page: figures (SVG files) and the table."""
    head = "".join(f"<th>{escape(text)}</th>" for text in _HEADINGS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(group)) + "</tr>"
        for group in _lines_of(document)
    )
    drawings = "".join(
        path.read_text("utf-8")[path.read_text("utf-8").index("<svg") :] for path in figures
    )
    style = (
        "body{font:14px/1.5 system-ui,sans-serif;margin:2rem;max-width:80rem}"
        "svg{max-width:100%;height:auto;display:block;margin:1rem 0}"
        "table{border-collapse:collapse}td,th{border-bottom:1px solid #ccc;padding:.2rem .6rem;"
        "text-align:right}td:first-child,th:first-child{text-align:left}"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>PyGraph: benchmarks</title>'
        f"<style>{style}</style></head><body><h1>Benchmarks</h1><p>{escape(_caption(document))}</p>"
        f"<p>{escape(summary(document))}</p>{drawings}<table><tr>{head}</tr>{rows}</table></body></html>\n"
    )


_DETAIL_HEADINGS = (
    *("Workload", "MiB copied per call: + graphs", "PyGraph"),
    *("graphs used", "not selected", "refused"),
    *("share of the hand-made graph's speed, synchronized: + graphs", "PyGraph"),
    *("compile s: + graphs", "PyGraph", "MiB after compiling: + graphs", "PyGraph"),
)


def details(document: dict[str, Any]) -> str:
    """A second table: copies, what became of the graphs, distance to the floor, compilation."""
    groups = [group for group in groups_of(document) if group.rows["pygraph"].get("graphs")]
    lines = [
        f"| {' | '.join(_DETAIL_HEADINGS)} |",
        "|" + "---|" * len(_DETAIL_HEADINGS),
        *(f"| {' | '.join(_detail_cells(group))} |" for group in groups),
    ]
    return "\n".join(lines) + "\n"


def _detail_cells(group: Group) -> list[str]:
    rows, own = group.rows, group.rows["pygraph"]
    both = (rows.get("inductor+graphs"), own)
    floor = rows.get("hand-made graph")

    def numbers(key: str, scale: float, digits: int) -> list[str]:
        return ["-" if row is None else f"{row[key] / scale:.{digits}f}" for row in both]

    return [
        group.label,
        *numbers("copied_bytes", 2**20, 2),
        *(str(own["graphs"].get(state, 0)) for state in ("captured", "not selected", "refused")),
        *(
            "-" if floor is None or row is None else f"{floor['latency_us'] / row['latency_us']:.2f}"
            for row in both
        ),
        *numbers("compile_s", 1, 1),
        *numbers("compile_peak_mib", 1, 0),
    ]


def _caption(document: dict[str, Any]) -> str:
    machine = document["machine"]
    return (
        f"{machine['gpu']}, driver {machine['driver']}, PyTorch {machine['torch']}, "
        f"commit {document['commit']}, {machine['date']}. Microseconds per call "
        f"(latency with a synchronize per call), then device memory in MiB.{_earlier(document)}"
    )


def _earlier(document: dict[str, Any]) -> str:
    """Says which rows were kept from runs at other commits; nothing where all are of one."""
    labels: dict[str, list[str]] = {}
    for group in groups_of(document):
        commit = group.rows["pygraph"].get("commit", document["commit"])
        labels.setdefault(commit, []).append(group.label)
    labels.pop(document["commit"], None)
    return "".join(f" From commit {commit}: {'; '.join(names)}." for commit, names in labels.items())


def _cells(group: Group) -> list[str]:
    rows, own = group.rows, group.rows["pygraph"]
    times = [
        f"{rows[c]['us']:.0f} ({rows[c]['latency_us']:.0f})" if c in rows else "-" for c in _COLUMNS
    ]
    baselines = [rows[c]["us"] for c in _COLUMNS[:2] if c in rows]
    error = own["rel_err"]
    return [
        f"{group.workload}, {group.mode}",
        str(own["batch"]),
        *times,
        f"{min(baselines) / own['us']:.2f}" if baselines else "-",
        *(_mib(rows.get(c)) for c in _COLUMNS[:3]),
        *(_share(rows.get(c)) for c in _COLUMNS[1:3]),
        "-" if error is None else "0" if error == 0 else f"{error:.1e}",
    ]


def _mib(row: dict[str, Any] | None) -> str:
    return "-" if row is None or row["peak_mib"] is None else f"{row['peak_mib']:.0f}"


def _share(row: dict[str, Any] | None) -> str:
    return "-" if row is None or row.get("in_graphs") is None else f"{row['in_graphs']:.1%}"


if __name__ == "__main__":
    print(markdown(json.loads(pathlib.Path(sys.argv[1]).read_text())), end="")
