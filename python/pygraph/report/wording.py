"""Numbers and sentences that the terminal and the page share."""

from __future__ import annotations

from collections.abc import Sequence

from pygraph.report.explanation import GraphRow, Report, Share, VariantTiming

GRAPH_COLUMNS = (
    *("graph", "state", "kernels", "inputs", "outputs", "relocations"),
    *("copies avoided per call", "workspace", "capture", "replays", "us per call"),
)


def graph_cells(row: GraphRow) -> list[str]:
    return [
        row.name,
        row.state,
        _count(row.kernels) + (f" ({row.lanes} at a time)" if (row.lanes or 1) > 1 else ""),
        *(_count(n) for n in (row.inputs, row.outputs, row.relocations)),
        *(in_bytes(n) for n in (row.bytes_not_copied, row.workspace_bytes)),
        "-" if row.capture_seconds is None else f"{row.capture_seconds * 1e3:.0f} ms",
        _count(row.replays),
        _timings(row.timings),
    ]


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


def _timings(timings: Sequence[VariantTiming]) -> str:
    """The selected variant comes first."""
    ordered = sorted(timings, key=lambda timing: not timing.selected)
    return ", ".join(f"{timing.variant} {timing.period_us:,.0f}" for timing in ordered) or "-"


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def in_bytes(number: int | None) -> str:
    if number is None:
        return "-"
    value, units = float(number), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:,.0f} {units[0]}" if units[0] == "B" else f"{value:,.1f} {units[0]}"
