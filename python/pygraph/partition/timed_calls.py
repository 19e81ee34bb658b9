"""Makes a call by one variant, uncaptured or replayed, and times it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pygraph import runtime, signal_exceptions
from pygraph.gpu import allocator, current
from pygraph.partition.host import Host
from pygraph.partition.signature import Entry
from pygraph.record import recorder
from pygraph.select.trial import UNCAPTURED, Sample, Trial, timed
from pygraph.undoing import Undo, undoing

if TYPE_CHECKING:
    from pygraph import _engine

# Of a signature whose trial could not go on.
_CALLS_UNTIL_RETRY = 1000


def make_room(host: Host, graph: _engine.CapturedGraph, trial: Trial) -> None:
    """Empties the allocator's cache if the trial's next call would find too little memory."""

    def is_short(undo: Undo) -> bool:
        current.use_device(host.info.device, undo)
        wanted = graph.output_bytes + graph.block_bytes + graph.workspace_bytes
        return not allocator.make_room(wanted)

    if undoing(is_short) and trial.variant == UNCAPTURED:
        graph.release_workspace()
        allocator.drop_blocks(host.info.device)


def timed_call(
    host: Host, entry: Entry, variant: str, args: list[Any], sleep: float
) -> tuple[Sequence[Any], Sample | None]:
    """Runs a variant. No sample if it was a replay that failed, and the call ran uncaptured, or if
    nothing could be measured. sleep: seconds that the GPU is kept busy before."""

    def body(undo: Undo) -> tuple[Sequence[Any], Sample | None]:
        current.use_device(host.info.device, undo)
        if variant == UNCAPTURED:
            return _measured(lambda: host.uncaptured(args), sleep)
        found = _timed_replay(host, entry, args, sleep)
        return found or (host.uncaptured(args), None)

    return undoing(body)


def _timed_replay(
    host: Host, entry: Entry, args: list[Any], sleep: float
) -> tuple[Sequence[Any], Sample | None] | None:
    """Returns None if nothing was launched. Then the memory that the error's frames held is free, and
    so is that of a dropped graph."""
    graph = entry.graph
    assert graph is not None
    try:
        found = _measured(lambda: graph.replay(args, True), sleep)
        args.clear()
        return found
    except torch.OutOfMemoryError:
        pass
    except (runtime.engine().StreamNotReady, runtime.engine().NotGivenAway) as error:
        if entry.selection.trial is not None and entry.selection.trial.note_not_started():
            runtime.engine().remove_graph(host.callable, graph)
            reason = f"its trial's calls could not be replayed, one after the other: {error}"
            host.refuse(entry, reason, calls_until_retry=_CALLS_UNTIL_RETRY)
        return None
    except Exception as error:
        signal_exceptions.pass_on(error)
        runtime.engine().remove_graph(host.callable, graph)
        host.refuse(entry, recorder.describe_failure(error))
        return None
    graph.release_workspace()  # for the uncaptured run
    allocator.drop_blocks(host.info.device)
    trial = entry.selection.trial
    if trial is not None and trial.note_no_room():
        host.refuse(entry, f"its replays {recorder.OUT_OF_MEMORY}")
    return None


def _measured(run: Callable[[], Sequence[Any]], sleep: float) -> tuple[Sequence[Any], Sample | None]:
    """Like ``timed``, but makes the call even if measuring fails."""
    results: list[Sequence[Any]] = []
    has_begun = False

    def call() -> Sequence[Any]:
        nonlocal has_begun
        has_begun = True
        results.append(run())
        return results[0]

    try:
        return timed(call, sleep)
    except Exception as error:
        if has_begun and not results:
            raise
        signal_exceptions.pass_on(error)
        runtime.note(logging.WARNING, "a call could not be timed: %s", error)
    return (results[0] if results else run()), None
