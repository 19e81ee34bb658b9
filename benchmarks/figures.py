"""The results as figures: PNG and SVG beside the JSON.

python -m benchmarks.figures RESULTS.json [FOLDER]
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from benchmarks.results_table import Group, geometric_mean, groups_of

_GRAPHS, _PYGRAPH = "inductor+graphs", "pygraph"
_NAMES = {_GRAPHS: "Inductor + graphs", _PYGRAPH: "PyGraph"}
_COLOURS = {_GRAPHS: "#9aa5b1", _PYGRAPH: "#2a7a4b"}


def speed_up(groups: list[Group]) -> Figure:
    """Throughput over Inductor's, a pair of bars per workload and the geometric mean."""
    rows = [group for group in groups if {"inductor", _GRAPHS, _PYGRAPH} <= group.rows.keys()]
    return _bars(
        rows,
        lambda row, group: group.rows["inductor"]["us"] / row["us"],
        "speed-up over Inductor",
        line=1.0,
        mean=True,
    )


def compile_time(groups: list[Group]) -> Figure:
    """Seconds to the end of the fourth call, with empty caches."""
    rows = [group for group in groups if {_GRAPHS, _PYGRAPH} <= group.rows.keys()]
    return _bars(rows, lambda row, group: row["compile_s"], "seconds to compile")


def coverage(groups: list[Group]) -> Figure:
    """The share of kernels in graphs."""
    rows = [
        group
        for group in groups
        if all((group.rows.get(name) or {}).get("in_graphs") is not None for name in _NAMES)
    ]
    return _bars(rows, lambda row, group: 100 * row["in_graphs"], "% of kernels in graphs")


def memory(groups: list[Group]) -> Figure:
    """Device memory in steady state over Inductor's."""
    rows = [
        group
        for group in groups
        if all((group.rows.get(name) or {}).get("peak_mib") for name in ("inductor", *_NAMES))
    ]
    return _bars(
        rows,
        lambda row, group: row["peak_mib"] / group.rows["inductor"]["peak_mib"],
        "device memory over Inductor's",
        line=1.0,
    )


FIGURES: dict[str, Callable[[list[Group]], Figure]] = {
    "speed_up": speed_up,
    "compile_time": compile_time,
    "coverage": coverage,
    "memory": memory,
}


def _bars(
    groups: list[Group],
    value: Callable[[dict[str, Any], Group], float],
    label: str,
    *,
    line: float | None = None,
    mean: bool = False,
) -> Figure:
    names = [group.label for group in groups]
    series = {name: [value(group.rows[name], group) for group in groups] for name in _NAMES}
    if mean and groups:
        names.append("geometric mean")
        for values in series.values():
            values.append(geometric_mean(values))
    figure, axes = plt.subplots(figsize=(max(5.0, 0.55 * len(names) + 2), 3.6), layout="constrained")
    for i, (name, values) in enumerate(series.items()):
        positions = [x + (i - 0.5) * 0.4 for x in range(len(names))]
        axes.bar(positions, values, 0.38, label=_NAMES[name], color=_COLOURS[name])
    if line is not None:
        axes.axhline(line, color="black", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    axes.set_ylabel(label)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def write(document: dict[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes every figure as PNG and SVG; the paths of the SVGs."""
    groups = groups_of(document)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in FIGURES.items():
        figure = draw(groups)
        for suffix in (".png", ".svg"):
            figure.savefig(folder / f"{name}{suffix}", dpi=160)
        plt.close(figure)
        paths.append(folder / f"{name}.svg")
    return paths


def main() -> int:
    source = pathlib.Path(sys.argv[1])
    folder = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else source.parent
    for path in write(json.loads(source.read_text()), folder):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
