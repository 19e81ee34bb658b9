"""The report as data. docs/reference/report.md documents its JSON form, :meth:`Report.to_dict`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from pygraph.observations import Applied, Cut, PlainLoop
from pygraph.report.stats import GraphStats

SCHEMA_VERSION = 2


@dataclasses.dataclass(frozen=True)
class Share:
    """How much of something is in graphs. unit: "kernels", "operations" or "us"."""

    unit: str
    in_graphs: float
    total: float

    @property
    def fraction(self) -> float:
        return self.in_graphs / self.total if self.total else 0.0


def variant_timings(row: GraphStats) -> list[dict[str, Any]]:
    """What the selection measured of each variant; empty if it measured nothing."""
    return [
        {
            "variant": name,
            "period_us": timing.period * 1e6,
            "host_us": timing.host * 1e6,
            "device_us": timing.device * 1e6,
            "latency_us": timing.latency * 1e6,
            "noise": timing.noise,
            "memory_bytes": timing.memory,
            "selected": name == row.selected,
        }
        for name, timing in row.timings.items()
    ]


@dataclasses.dataclass(frozen=True)
class StripPart:
    """One stretch of the program's GPU work, in order. width: kernels, operations or microseconds."""

    kind: str  # "graph" or "gap"
    label: str
    width: float


@dataclasses.dataclass(frozen=True)
class KernelRow:
    """Kernels of one name in the profiled call: how many, how many of them in graphs, microseconds
    together.

    operators: that the compiler fused into it; where: the user's "file:line"s. Both are empty for
        kernels that the compiler did not generate.
    """

    name: str
    count: int
    in_graphs: int
    us: float
    operators: tuple[str, ...] = ()
    where: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds per call with a synchronize after each: medians, interleaved."""

    with_graphs_us: float
    uncaptured_us: float


@dataclasses.dataclass(frozen=True)
class Report:
    """What PyGraph did with a program.

    estimated: nothing ran; counts are of operations, of which the compiler fuses many into a kernel.
    shares: of kernels (or operations), and of GPU time where it was measured.
    graphs: also functions that stayed uncaptured. Without a GPU their state is "expected".
    strip_unit: what the widths of the strip are.
    kernels: of the profiled call, those with the most GPU time first.
    loops: of a script, where it trains without a graph of the whole step.
    """

    program: str
    device: str
    estimated: bool
    shares: tuple[Share, ...] = ()
    graphs: tuple[GraphStats, ...] = ()
    cuts: tuple[Cut, ...] = ()
    transformations: tuple[Applied, ...] = ()
    strip: tuple[StripPart, ...] = ()
    strip_unit: str = "operations"
    timing: Timing | None = None
    kernels: tuple[KernelRow, ...] = ()
    loops: tuple[PlainLoop, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        result = dataclasses.asdict(self)
        for share, data in zip(self.shares, result["shares"], strict=True):
            data["fraction"] = share.fraction
        for row, data in zip(self.graphs, result["graphs"], strict=True):
            data["timings"] = variant_timings(row)
        return {"schema_version": SCHEMA_VERSION, **result}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self) -> str:
        """One self-contained page."""
        from pygraph.report.html import render

        return render(self)

    def save(self, path: str | Path) -> None:
        """Writes the page (*.html) or the data (*.json). Raises ValueError for another suffix."""
        path = Path(path)
        if path.suffix not in (".html", ".json"):
            raise ValueError(f"a report is saved as .html or .json, not as {path.name!r}")
        path.write_text(self.to_html() if path.suffix == ".html" else self.to_json(), "utf-8")

    def __str__(self) -> str:
        from pygraph.report.terminal import render

        return render(self)


def without_graphs(program: str, reason: str) -> Report:
    """The report of a callable that was not called, because no graph is possible in this process."""
    cut = Cut("refusal", f"{program} stays uncaptured: {reason}", "")
    return Report(program, "no GPU", estimated=True, cuts=(cut,))
