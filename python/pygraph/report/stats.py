"""``pygraph.stats()``: one row for each graph of the process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from pygraph import runtime
from pygraph.partition.signature import Entry, PartitionInfo
from pygraph.report.remedies import remedy_for, where_in
from pygraph.runtime import AnyPartition
from pygraph.select.trial import Timing


@dataclasses.dataclass(frozen=True)
class GraphStats:
    """One partition of a compiled program, or one variant of a graphed callable, for one signature of
    its arguments.

    name: "forward", "backward" or "inference", with a number if a program has several; or the
        callable's name.
    device: index of the GPU.
    state: "captured", "uncaptured" (not recorded yet), "measuring" (on trial), "not selected" (running
        uncaptured is as fast) or "refused".
    reason: why it was refused, or was not selected; else empty. where: the "file:line" that it names,
        or empty. remedy: what to change to give a callable its graph; empty if none is known, or if the
        reason says it.
    timings: seconds per call of each variant, as the trial measured them; empty if nothing was
        measured.
    selected: the variant that is used; empty if nothing was measured.
    nodes, relocations, symbols: their numbers in the graph. A relocation is a word that holds an
        address.
    inputs, outputs: their numbers in the graph; without a graph, ``inputs`` counts the function's
        arguments.
    lanes: how many nodes may run at the same time (1: one after the other). Without a graph, this and
        all other numbers of the graph are 0.
    replays: launches so far. nodes_touched: nodes that got new addresses, summed over all launches.
    calls_elsewhere: calls that ran uncaptured because a replay on their stream would have had to wait
        for another stream, or was the first one there.
    bytes_not_copied: bytes per call that Inductor's graphs would copy into static inputs.
    workspace_bytes: internal memory that stays allocated between launches, shared by all graphs of a
        stream.
    block_bytes: internal memory that each launch allocates and frees.
    executable_bytes: device memory of the executable graph, as far as it could be measured.
    capture_seconds: duration of recording twice, linking and verifying.
    audits: replays that were compared with an uncaptured call. audits_failed: of these, the ones that
        found the graph wrong (it is then refused). audits_skipped: audits that were due and not
        possible, for example because memory was short.
    replays_since_audit: replays since the graph was last found right, by verification or an audit.
    followed: numbers on the host whose current value each replay of a callable uses, such as learning
        rates. All other numbers that the callable reads are compared at each call.
    gpu_us: GPU time in microseconds of its kernels in the call that `pygraph.explain` profiled, summed;
        None if not known.
    """

    name: str
    device: int
    state: str
    reason: str
    nodes: int = 0
    inputs: int = 0
    outputs: int = 0
    relocations: int = 0
    symbols: int = 0
    lanes: int = 0
    replays: int = 0
    nodes_touched: int = 0
    calls_elsewhere: int = 0
    bytes_not_copied: int = 0
    workspace_bytes: int = 0
    block_bytes: int = 0
    executable_bytes: int = 0
    capture_seconds: float = 0.0
    timings: Mapping[str, Timing] = dataclasses.field(default_factory=dict)
    selected: str = ""
    audits: int = 0
    audits_failed: int = 0
    audits_skipped: int = 0
    replays_since_audit: int = 0
    gpu_us: float | None = None
    followed: tuple[str, ...] = ()
    where: str = ""
    remedy: str = ""


# Fields that a graph has under the same names.
_OF_THE_GRAPH = (
    *("nodes", "inputs", "outputs", "relocations", "symbols", "lanes", "replays", "nodes_touched"),
    *("calls_elsewhere", "workspace_bytes", "block_bytes"),
)


def stats() -> list[GraphStats]:
    """One row per partition and signature, in no particular order. Thread-safe."""
    return rows_of(runtime.all_partitions())


def rows_of(partitions: Iterable[AnyPartition]) -> list[GraphStats]:
    return [graph_row(p.info, entry) for p in partitions for entry in p.entries.copy().values()]


def graph_row(info: PartitionInfo, entry: Entry) -> GraphStats:
    """The row of one signature of a partition."""
    # Read once each: other threads may drop a graph or a decision meanwhile.
    graph, decision, audits = entry.graph, entry.selection.decision, entry.audits
    row = GraphStats(
        name=info.name,
        device=info.device,
        state=entry.state.value,
        reason=entry.reason,
        inputs=info.argument_count,
        bytes_not_copied=entry.recording.bytes_not_copied,
        executable_bytes=entry.recording.executable_bytes,
        capture_seconds=entry.recording.capture_seconds,
        timings=decision.timings if decision else {},
        selected=decision.selected if decision else "",
        audits=audits.made,
        audits_failed=audits.failed,
        audits_skipped=audits.skipped,
        replays_since_audit=audits.replays_since_good(graph.replays if graph else None),
        followed=info.followed,
        where=where_in(entry.reason),
        remedy=remedy_for(entry.reason),
    )
    if graph is None:
        return row
    failure = graph.failure
    return dataclasses.replace(
        row,
        state="refused" if failure else row.state,
        reason=failure or row.reason,
        **{name: getattr(graph, name) for name in _OF_THE_GRAPH},
    )
