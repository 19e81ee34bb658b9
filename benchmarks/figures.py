"""The results as figures: PNG and SVG beside the JSON.

python -m benchmarks.figures RESULTS.json [FOLDER]

RESULTS.json is a suite's, or a list of what indirection.cu prints.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from benchmarks.results_table import Group, geometric_mean, groups_of
from benchmarks.steps.table import rows_by_workload

_GRAPHS, _PYGRAPH = "inductor+graphs", "pygraph"
_STAGES = {  # the ablation, in its order
    _GRAPHS: "Inductor + graphs",
    "inductor+graphs+transforms": "+ transformations",
    "pygraph, every graph": "+ relocation",
    _PYGRAPH: "+ selection (PyGraph)",
}
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
    """Seconds that the first calls take longer than later ones, with empty caches."""
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


def ablation(groups: list[Group]) -> Figure:
    """What each part adds, in throughput over Inductor's."""
    rows = [group for group in groups if {"inductor", *_STAGES} <= group.rows.keys()]
    names = [group.label for group in rows]
    figure, axes = plt.subplots(figsize=(max(5.0, 0.9 * len(names) + 2), 3.6), layout="constrained")
    greys = plt.get_cmap("Greens")
    for i, (backend, label) in enumerate(_STAGES.items()):
        values = [group.rows["inductor"]["us"] / group.rows[backend]["us"] for group in rows]
        positions = [x + (i - 1.5) * 0.2 for x in range(len(names))]
        axes.bar(positions, values, 0.19, label=label, color=greys(0.3 + 0.2 * i))
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    axes.set_ylabel("speed-up over Inductor")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def copies(groups: list[Group]) -> Figure:
    """MiB that a call copies into fixed inputs."""
    rows = [
        group
        for group in groups
        if all((group.rows.get(name) or {}).get("copied_bytes") is not None for name in _NAMES)
    ]
    return _bars(rows, lambda row, group: row["copied_bytes"] / 2**20, "MiB copied per call")


FIGURES: dict[str, Callable[[list[Group]], Figure]] = {
    "speed_up": speed_up,
    "compile_time": compile_time,
    "coverage": coverage,
    "memory": memory,
    "ablation": ablation,
    "copies": copies,
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


def indirection(measurements: list[dict[str, Any]]) -> Figure:
    """Latency of the ways to give a graph other addresses (lines of benchmarks/indirection.cu)."""
    figure, axes = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
    for way in dict.fromkeys(m["way"] for m in measurements):
        for size, style in ((4096, "-"), (262144, "--")):
            line = [m for m in measurements if m["way"] == way and m["bytes"] == size]
            axes.plot(
                [m["parameters"] for m in line],
                [m["latency_us"] for m in line],
                style,
                marker="o",
                markersize=3,
                label=f"{way}, {size >> 10} KiB each",
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("parameters that change")
    axes.set_ylabel("us per launch, synchronized")
    axes.legend(frameon=False, fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


_STEPS = {  # of the suite of whole steps, and their names in the figure
    "inductor": ("Inductor", "#c9cfd6"),
    _GRAPHS: (_NAMES[_GRAPHS], _COLOURS[_GRAPHS]),
    _PYGRAPH: ("PyGraph, model alone", "#9cc8ae"),
    "pygraph.graph": ("pygraph.graph", _COLOURS[_PYGRAPH]),
    "hand-made": ("graph made by hand", "#3b4754"),
}


def steps(document: dict[str, Any]) -> Figure:
    """Whole steps: throughput over that of eager steps."""
    found = rows_by_workload(document)
    names = [name for name, rows in found.items() if rows.get("eager", {}).get("us")]
    figure, axes = plt.subplots(figsize=(max(5.0, 0.9 * len(names) + 2), 3.6), layout="constrained")
    for i, (variant, (label, colour)) in enumerate(_STEPS.items()):
        drawn = [(x, name) for x, name in enumerate(names) if found[name].get(variant, {}).get("us")]
        gains = [found[name]["eager"]["us"] / found[name][variant]["us"] for _, name in drawn]
        axes.bar([x + (i - 2) * 0.17 for x, _ in drawn], gains, 0.16, label=label, color=colour)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    axes.set_ylabel("speed-up over the eager step")
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _drawings(document: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    if any("variant" in row for row in document["rows"]):
        yield "steps", steps(document)
        return
    groups = groups_of(document)
    for name, draw in FIGURES.items():
        yield name, draw(groups)


def write(document: dict[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes every figure as PNG and SVG; the paths of the SVGs."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in _drawings(document):
        if not any(axes.patches for axes in figure.axes):
            plt.close(figure)  # nothing of this kind was measured
            continue
        for suffix in (".png", ".svg"):
            figure.savefig(folder / f"{name}{suffix}", dpi=160)
        plt.close(figure)
        paths.append(folder / f"{name}.svg")
    return paths


def main() -> int:
    source = pathlib.Path(sys.argv[1])
    folder = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else source.parent
    document = json.loads(source.read_text())
    if isinstance(document, list):
        indirection(document).savefig(folder / "indirection.svg")
        return 0
    for path in write(document, folder):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
