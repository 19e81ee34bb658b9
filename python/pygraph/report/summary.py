"""One line on a process, for ``python -m pygraph --summary``: only what was counted or measured."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable

from torch import fx

from pygraph import observations, runtime
from pygraph.partition.signature import Entry, PartitionInfo
from pygraph.report.classify import segments
from pygraph.report.estimate import strip_parts
from pygraph.report.stats import GraphStats, graph_row, rows_of
from pygraph.runtime import AnyPartition
from pygraph.select.trial import REPLAYED, UNCAPTURED


class Tally:
    """Counts all partitions, including those of programs that no longer exist. Thread-safe."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[AnyPartition] = weakref.WeakSet()
        self._ended: list[GraphStats] = []
        self.programs = 0  # compiled, or loaded from a cache
        # Per traced program, operations on the GPU outside of partitions.
        self.outside: list[float] = []

    def note_program(self) -> None:
        self.programs += 1

    def note_graph(self, graph: fx.Graph) -> None:
        """A program was traced, which those that come from a cache are not."""
        parts = strip_parts(segments(graph))
        self.outside.append(sum(part.width for part in parts if part.kind == "gap"))

    def note_partition(self, partition: AnyPartition) -> None:
        self._alive.add(partition)
        # Holds the entries until the partition ends, and then no longer; and no tensors of the
        # program's, which may refer to the partition.
        info = dataclasses.replace(partition.info, gradients=None, own=None)
        end = weakref.finalize(partition, self._keep_rows, info, partition.entries)
        end.atexit = False

    def _keep_rows(self, info: PartitionInfo, entries: dict[bytes, Entry]) -> None:
        self._ended += [graph_row(info, entry) for entry in entries.copy().values()]

    def rows(self) -> list[GraphStats]:
        return rows_of(runtime.members(self._alive)) + self._ended


_tally: Tally | None = None


def begin() -> None:
    """Starts counting. May be called again."""
    global _tally
    if _tally is None:
        _tally = observations.tally = Tally()


def line() -> str:
    """The summary of everything that was compiled since ``begin``."""
    if _tally is None:
        return "torch.compile was not called with PyGraph"
    reason = runtime.unavailable_reason()
    if reason is not None:
        return f"nothing was captured: {reason}"
    unknown = _tally.programs - len(_tally.outside)
    return summarize(_tally.rows(), sum(_tally.outside), unknown)


def summarize(rows: Iterable[GraphStats], outside: float, unknown: int) -> str:
    """The summary as one line.

    rows: of all partitions.
    outside: operations on the GPU outside partitions.
    unknown: number of programs that ``outside`` does not include.
    """
    rows = list(rows)
    graphs = [row for row in rows if row.state == "captured"]
    replays = sum(row.replays for row in graphs)
    parts = [f"{len(graphs)} graphs in use, {replays:,} replays"]
    kernels = sum(row.nodes for row in graphs)
    others = [row for row in rows if row.state in ("measuring", "not selected", "refused")]
    if graphs and unknown == 0:
        share = kernels / (kernels + outside)
        # Kernels of functions that run uncaptured were not counted.
        most = "at most " if others else ""
        parts.append(f"{most}{share:.1%} of the kernels in graphs")
    elif graphs:
        parts.append(
            f"{kernels:,} kernels in graphs, those outside not known ({unknown} programs cached)"
        )
    if others:
        states = sorted({row.state for row in others})
        counts = (f"{sum(row.state == state for row in others)} {state}" for state in states)
        parts.append(", ".join(counts))
    parts.append(_saved(graphs))
    return "; ".join(parts)


def _saved(graphs: list[GraphStats]) -> str:
    """The time that all replays saved, as text, by the selection's measurements of both variants."""
    measured = [row for row in graphs if UNCAPTURED in row.timings and REPLAYED in row.timings]
    if not measured:
        return "time saved: not measured"
    seconds = sum(
        (row.timings[UNCAPTURED].period - row.timings[REPLAYED].period) * row.replays
        for row in measured
    )
    of = "" if len(measured) == len(graphs) else f", in {len(measured)} of {len(graphs)} graphs"
    return f"time saved, by the selection's measurements: {seconds:.3g} s{of}"
