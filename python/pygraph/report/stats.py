"""What became of each graph of the process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pygraph import runtime
from pygraph.partition.signature import Entry, PartitionInfo
from pygraph.select.trial import Timing


@dataclasses.dataclass(frozen=True)
class GraphStats:
    """One partition of a compiled program, for one signature of its arguments.

    name: "forward", "backward" or "inference", with a number where a program has several.
    state: "captured", "uncaptured" (not recorded yet), "measuring" (on trial), "not selected" (running
        uncaptured is as fast) or "refused".
    reason: why it was refused, or was not selected; empty otherwise.
    timings: what was measured of each variant when it was selected; empty where nothing was measured.
    nodes, relocations, symbols: of the graph. A relocation is a word that holds an address.
    lanes: how many of its kernels may run at a time (1: one after the other).
    replays: launches so far. nodes_touched: node updates in all of them.
    calls_elsewhere: calls that ran uncaptured because a replay on their stream would have had to wait
        for another stream, or was the first one there.
    patched_on_device: whether one kernel on the GPU makes the node updates, and not the host, node by
        node.
    bytes_not_copied: per call, what Inductor's graphs would copy into fixed inputs.
    workspace_bytes: internal memory that is kept between launches, shared by all graphs of a stream.
    block_bytes: internal memory that is taken for each launch and given back at once.
    executable_bytes: device memory that the executable graph took, as far as it showed.
    capture_seconds: for recording twice, linking and verifying.
    audits: replays that were compared with an uncaptured call since; audits_failed: of them, those that
        found the graph wrong (it is refused then); audits_skipped: what was due and not possible, as
        memory was short, say.
    replays_since_audit: replays since the graph was last found right, by verification or an audit.
    """

    name: str
    device: int
    state: str
    reason: str
    nodes: int
    relocations: int
    symbols: int
    lanes: int
    replays: int
    nodes_touched: int
    calls_elsewhere: int
    patched_on_device: bool
    bytes_not_copied: int
    workspace_bytes: int
    block_bytes: int
    executable_bytes: int
    capture_seconds: float
    timings: Mapping[str, Timing]
    audits: int
    audits_failed: int
    audits_skipped: int
    replays_since_audit: int


def stats() -> list[GraphStats]:
    """One row per partition and signature, in no particular order. Thread-safe."""
    return [
        _row(partition.info, entry)
        for partition in runtime.all_partitions()
        for entry in partition.entries.copy().values()
    ]


def _row(info: PartitionInfo, entry: Entry) -> GraphStats:
    # Read once each: other threads may drop a graph or a decision meanwhile.
    graph, decision, audits = entry.graph, entry.decision, entry.audits
    failure = str(graph.failure) if graph is not None else ""
    return GraphStats(
        name=info.name,
        device=info.device,
        state="refused" if failure else entry.state.value,
        reason=failure or entry.reason,
        nodes=graph.nodes if graph else 0,
        relocations=graph.relocations if graph else 0,
        symbols=graph.symbols if graph else 0,
        lanes=graph.lanes if graph else 0,
        replays=graph.replays if graph else 0,
        nodes_touched=graph.nodes_touched if graph else 0,
        calls_elsewhere=graph.calls_elsewhere if graph else 0,
        patched_on_device=bool(graph and graph.is_patched_on_device),
        bytes_not_copied=entry.copied_bytes,
        workspace_bytes=graph.workspace_bytes if graph else 0,
        block_bytes=graph.block_bytes if graph else 0,
        executable_bytes=entry.executable_bytes,
        capture_seconds=entry.capture_seconds,
        timings=decision.timings if decision else {},
        audits=audits.made,
        audits_failed=audits.failed,
        audits_skipped=audits.skipped,
        replays_since_audit=audits.replays_since_good(graph.replays if graph else None),
    )
