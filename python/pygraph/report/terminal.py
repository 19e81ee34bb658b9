"""The report as tables for a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pygraph.report.explanation import Report
from pygraph.report.wording import (
    GRAPH_COLUMNS,
    KERNEL_COLUMNS,
    graph_cells,
    headline,
    kernel_cells,
    loop_lines,
)

_WIDTH = 140
_STRIP_WIDTH = 96
_KERNELS = 12  # those with the most GPU time


def render(report: Report) -> str:
    output = io.StringIO()
    console = Console(file=output, width=_WIDTH, highlight=False)
    console.print(Text(f"{report.program} on {report.device}", style="bold"))
    for line in headline(report):
        console.print(Text(line))
    if report.strip:
        console.print(_strip(report))
    if report.graphs:
        console.print(_table("Graphs", GRAPH_COLUMNS, map(graph_cells, report.graphs), 2))
    if report.kernels:
        kernels = map(kernel_cells, report.kernels[:_KERNELS])
        console.print(_table("Kernels", KERNEL_COLUMNS, kernels, 3))
    if report.cuts:
        cuts = ((cut.where or "-", cut.reason, cut.remedy or "-") for cut in report.cuts)
        console.print(_table("Cuts and refusals", ("where", "why", "what would remove it"), cuts))
    if report.transformations:
        notes = ((note.where or "-", note.transform, note.what) for note in report.transformations)
        console.print(_table("Transformations applied", ("where", "transformation", "what"), notes))
    for loop in report.loops:
        for line in loop_lines(loop):
            console.print(Text(line), soft_wrap=True)
    return output.getvalue()


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 3) -> Table:
    """texts: how many columns come before those of numbers."""
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < texts else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _strip(report: Report) -> Text:
    """Graphs as full blocks, gaps as light ones, to scale."""
    total = sum(part.width for part in report.strip) or 1.0
    text = Text()
    end = 0.0
    for part in report.strip:
        begin, end = end, end + part.width
        cells = round(end / total * _STRIP_WIDTH) - round(begin / total * _STRIP_WIDTH)
        is_graph = part.kind == "graph"
        text.append(("█" if is_graph else "░") * cells, "green" if is_graph else "red")
    text.append(f"  █ graph ░ gap, by {report.strip_unit}")
    return text
