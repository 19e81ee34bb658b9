"""The report as tables for a terminal."""

from __future__ import annotations

import io

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

_STRIP_WIDTH = 96
_KERNELS = 12  # those with the most GPU time


def render(report: Report, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show(report, console)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def show(report: Report, console: Console) -> None:
    """Prints the report."""
    console.print(Text(f"{report.program} on {report.device}", style="bold"))
    for line in headline(report):
        console.print(Text(line))
    if report.strip:
        console.print(_strip(report))
    if report.graphs:
        console.print(_graphs(report))
    if report.kernels:
        console.print(_kernels(report))
    if report.cuts:
        table = Table("where", "why", "what would remove it", title="Cuts and refusals")
        for cut in report.cuts:
            table.add_row(Text(cut.where or "-"), Text(cut.reason), Text(cut.remedy or "-"))
        console.print(table)
    if report.transformations:
        table = Table("where", "transformation", "what", title="Transformations applied")
        for note in report.transformations:
            table.add_row(Text(note.where or "-"), Text(note.transform), Text(note.what))
        console.print(table)
    for loop in report.loops:
        for line in loop_lines(loop):
            console.print(Text(line), soft_wrap=True)


def _graphs(report: Report) -> Table:
    table = Table(title="Graphs")
    for i, column in enumerate(GRAPH_COLUMNS):
        table.add_column(column, justify="left" if i < 2 else "right")
    for row in report.graphs:
        table.add_row(*(Text(cell) for cell in graph_cells(row)))
    return table


def _kernels(report: Report) -> Table:
    table = Table(title="Kernels")
    for i, column in enumerate(KERNEL_COLUMNS):
        table.add_column(column, justify="left" if i < 3 else "right")
    for row in report.kernels[:_KERNELS]:
        table.add_row(*(Text(cell) for cell in kernel_cells(row)))
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
