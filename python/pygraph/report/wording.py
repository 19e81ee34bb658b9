"""Numbers and sentences that the terminal and the page share."""

from __future__ import annotations

from collections.abc import Sequence

from pygraph.observations import PlainLoop
from pygraph.report.explanation import KernelRow, Report, Share
from pygraph.report.stats import GraphStats

GRAPH_COLUMNS = (
    "graph",
    "state",
    "nodes",
    "inputs",
    "outputs",
    "relocations",
    "copies avoided per call",
    "workspace",
    "capture",
    "replays",
    "since audit",
    "follows",
    "GPU us",
    "us per call",
)
KERNEL_COLUMNS = ("kernel", "operators", "where", "count", "in graphs", "GPU us")
_SHOWN = 3  # operators, or lines, of one kernel


def kernel_cells(row: KernelRow) -> list[str]:
    return [
        row.name,
        _some(row.operators),
        _some(row.where),
        f"{row.count:,}",
        f"{row.in_graphs:,}",
        f"{row.us:,.1f}",
    ]


def _some(texts: Sequence[str]) -> str:
    more = len(texts) - _SHOWN
    return (", ".join(texts[:_SHOWN]) or "-") + (f" and {more} more" if more > 0 else "")


def graph_cells(row: GraphStats) -> list[str]:
    has_graph = row.lanes > 0  # else its numbers are not known
    return [
        row.name,
        row.state,
        f"{row.nodes:,}" + (f" ({row.lanes} at a time)" if row.lanes > 1 else ""),
        f"{row.inputs:,}",
        f"{row.outputs:,}",
        f"{row.relocations:,}" if has_graph else "-",
        in_bytes(row.bytes_not_copied) if has_graph else "-",
        in_bytes(row.workspace_bytes) if has_graph else "-",
        f"{row.capture_seconds * 1e3:.0f} ms" if has_graph else "-",
        f"{row.replays:,}" if has_graph else "-",
        f"{row.replays_since_audit:,}" if has_graph else "-",
        _some(row.followed),
        "-" if row.gpu_us is None else f"{row.gpu_us:,.0f}",
        _timings(row),
    ]


def loop_sentence(loop: PlainLoop) -> str:
    return (
        f"{loop.where}: a training loop without a graph of its whole step ({', '.join(loop.calls)}). "
        "pygraph.graph makes one:"
    )


def loop_lines(loop: PlainLoop) -> list[str]:
    return ["", loop_sentence(loop), "", *(f"    {line}".rstrip() for line in loop.code.splitlines())]


def share_sentence(share: Share) -> str:
    noun = "of GPU time" if share.unit == "us" else f"of {share.unit}"
    amounts = f"{share.in_graphs:,.0f} of {share.total:,.0f}{' us' if share.unit == 'us' else ''}"
    return f"{share.fraction:.1%} {noun} in graphs ({amounts})"


def headline(report: Report) -> list[str]:
    lines = [share_sentence(share) for share in report.shares]
    if any(share.unit == "operations" for share in report.shares):
        lines.append(
            "Estimated without running: operations are counted, and the compiler fuses many of them "
            "into one kernel."
        )
    elif report.estimated:
        lines.append(
            "Counted, not profiled: kernels of each graph once, and operations outside of graphs."
        )
    if report.timing is not None:
        timing = report.timing
        lines.append(
            f"{timing.with_graphs_us:,.0f} us per call, {timing.uncaptured_us:,.0f} us without graphs "
            f"({timing.uncaptured_us / timing.with_graphs_us:.2f} x)"
        )
    return lines


def _timings(row: GraphStats) -> str:
    """The selected variant comes first."""
    ordered = sorted(row.timings.items(), key=lambda item: item[0] != row.selected)
    return ", ".join(f"{name} {timing.period * 1e6:,.0f}" for name, timing in ordered) or "-"


def in_bytes(number: int) -> str:
    value, units = float(number), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:,.0f} {units[0]}" if units[0] == "B" else f"{value:,.1f} {units[0]}"
