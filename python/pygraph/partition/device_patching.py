"""Addresses can be patched on the device, too: by one kernel before the graph, for all that changed.

The host patches a node in 0.2 us, while the GPU still works on what came before; the kernel takes the
host 4 us and the GPU 5, whatever the number of nodes (include/pygraph/device_patcher.h). So it may pay
where many nodes change in each call, as in an unrolled loop whose input moves. Most graphs touch few:
PyTorch's allocator hands out the same addresses in a steady loop. Replays are counted, and only a graph
that touches many nodes is copied into that form, proven to give the same results, and put on trial.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from pygraph import runtime
from pygraph.gpu import allocator
from pygraph.gpu.clones import clone_shared_storages
from pygraph.gpu.fingerprint import forget
from pygraph.partition.host import Host
from pygraph.partition.signature import Entry
from pygraph.record.recorder import describe_failure
from pygraph.select.trial import PATCHED_ON_DEVICE, REPLAYED, Decision, Timing, Trial
from pygraph.verify.compare import fingerprints
from pygraph.verify.rehearsal import POISON_ONES

log = logging.getLogger("pygraph")

# Touched nodes per replay from which on it is tried: measured apart, the host is faster below.
MANY_NODES = 20
# What the host takes per node at most, and the share of a replay from which on a trial can tell.
_HOST_SECONDS, _LEAST_GAIN = 0.5e-6, 0.01


def is_open(entry: Entry) -> bool:
    """Whether the entry's graph might gain, and was not tried yet."""
    graph = entry.graph
    return graph is not None and not entry.has_tried_device and graph.nodes_on_device >= MANY_NODES


def count(entry: Entry) -> float:
    """Nodes touched per replay since the last count."""
    assert entry.graph is not None
    replays_before, touched_before = entry.counted
    entry.counted = replays, touched = int(entry.graph.replays), int(entry.graph.nodes_touched)
    return (touched - touched_before) / max(1, replays - replays_before)


def form_of(graph: Any) -> str:
    """The variant that the graph's replays are."""
    return PATCHED_ON_DEVICE if graph.is_patched_on_device else REPLAYED


def consider(
    partition: Host, entry: Entry, decision: Decision, args: list[Any], touched: float
) -> Trial | None:
    """Lets the device patch the entry's graph, if that was decided, and proves to be right with the
    arguments of a call. If it was not, and calls touch many nodes: the trial that is to be made."""
    is_decided = decision.selected == PATCHED_ON_DEVICE
    assert entry.graph is not None
    if not is_decided and not _may_gain(touched, decision.timings[form_of(entry.graph)]):
        return None
    entry.has_tried_device = True
    graph = entry.graph
    try:
        with torch.cuda.device(partition.info.device):
            failure = prove(graph, args, partition.moving(args), partition.written)
    except RuntimeError as error:
        _give_up(partition, entry, error)
        return None
    if failure:
        log.info("%s: the host goes on patching its graph: %s", partition.info.name, failure)
        return None
    if is_decided:
        graph.drop_other_patching()
        return None
    kept = entry.persistent_bytes
    return Trial({REPLAYED: kept, PATCHED_ON_DEVICE: kept + graph.device_patch_bytes})


def _may_gain(touched: float, host: Timing) -> bool:
    """Whether that many nodes are worth a trial; host: what was measured of the graph so far."""
    return touched >= MANY_NODES and touched * _HOST_SECONDS > _LEAST_GAIN * host.latency


def settle(partition: Host, entry: Entry, selected: str) -> None:
    """A trial has ended: the graph keeps the form that was selected."""
    assert entry.graph is not None
    try:
        entry.graph.patch_on_device(selected == PATCHED_ON_DEVICE)
        entry.graph.drop_other_patching()
    except RuntimeError as error:
        _give_up(partition, entry, error)


def _give_up(partition: Host, entry: Entry, error: RuntimeError) -> None:
    assert entry.graph is not None
    runtime.engine().remove_graph(partition.callable, entry.graph)
    partition.refuse(entry, describe_failure(error))


def prove(graph: Any, args: Sequence[Any], moving: Sequence[int], written: frozenset[int]) -> str:
    """Lets the device patch the graph, if its replays on copies of ``args`` then have the same results,
    bit by bit, as when the host patches it. Else says why not, and leaves the graph as it was.

    moving: positions of the tensors that are elsewhere in other calls. They are copied, each time to
    other addresses. written: of these, the ones that a replay writes.

    Raises RuntimeError if the graph cannot be left as it was.
    """
    copied = sum(args[i].nbytes for i in moving)
    if not allocator.make_room(2 * (copied + graph.output_bytes) + graph.block_bytes):
        return "there is no memory for a proof"
    generators = [arg for arg in args if isinstance(arg, torch.Generator)]
    generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    offsets = [generator.get_offset() for generator in generators]
    found: list[list[int]] = []
    before: Any = None  # the last run's memory, so that the next one's is elsewhere
    failure = "patched on the device, it has other results"
    try:
        for on_device in (False, False, True, True):
            graph.patch_on_device(on_device)
            for generator, offset in zip(generators, offsets, strict=True):
                generator.set_offset(offset)
            clones = clone_shared_storages(args, moving)
            outputs = graph.replay(clones, True, POISON_ONES)
            results = [*outputs, *(clones[i] for i in sorted(written.difference(graph.donated)))]
            found.append(fingerprints(results))
            before = clones, results
        if _agree(*found):
            failure = ""
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        failure = describe_failure(error)
    finally:
        del before
        forget()
        for generator, offset in zip(generators, offsets, strict=True):
            generator.set_offset(offset)
    if failure:
        graph.patch_on_device(False)
        graph.drop_other_patching()
    return failure


def _agree(host: list[int], again: list[int], device: list[int], device_again: list[int]) -> bool:
    """Whether the device's results are the host's, wherever the host's are not left to chance."""
    steady = [i for i, value in enumerate(host) if again[i] == value]
    same = all(device[i] == host[i] == device_again[i] for i in steady)
    return same and (len(steady) > 0 or not host)
