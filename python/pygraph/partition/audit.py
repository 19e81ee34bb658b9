"""Verification goes on: a graph that was right at its second call can be wrong at its millionth.

An operator may replace memory that its kernels read, a library may free what a graph has the address
of. So now and then (verify/audit_schedule.py) the uncaptured function makes a call, whose results the
user gets, and the graph is replayed beside it:

    replay    on clones of what it overwrites, its fresh outputs poisoned, on copies of the generators
    call      uncaptured, on the arguments themselves
    compare   outputs and written inputs, bit by bit

Other threads replay the graph meanwhile. Where results differ, the graph rests, and its next call takes
the same closer look as verification (verify/compare.py), because some kernels never return the same
twice. A graph that is found wrong is dropped for good, and the other graphs of its function are audited
at their next calls.

An audit needs memory for the clones and for a second set of results. Where the device has less than
that it is tried later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from pygraph import runtime
from pygraph.partition.audit_look import Look, give_back
from pygraph.partition.signature import Entry, State
from pygraph.record.recorder import OUT_OF_MEMORY, Recording
from pygraph.verify import verify
from pygraph.verify.audit_schedule import Audits

if TYPE_CHECKING:
    from pygraph.partition.partition import Partition


class _Released:
    """In the place of a recording's stand-ins, which are gone: nothing can be poisoned there."""

    def poison(self) -> None:
        pass

    def untouched(self) -> bool:
        return True


def start(entry: Entry, interval: int | None) -> None:
    """The entry has a new graph. interval: the option ``pygraph.audit``."""
    replays = int(entry.graph.replays)
    entry.audits = Audits(interval, extra=replays, good_at=replays)
    entry.graph.audit_at = entry.audits.due_at(replays)


def is_due(entry: Entry) -> bool:
    """Whether the entry's graph is in use, and its next call is to be audited."""
    graph = entry.graph
    return entry.state is State.CAPTURED and graph is not None and bool(graph.is_audit_due)


def postpone(entry: Entry) -> None:
    """Something is in the way of an audit that is due; a graph that is suspected goes on resting."""
    graph = entry.graph
    if graph is None:
        return
    graph.audit_at = entry.audits.soon(graph.replays)
    if entry.audits.suspects:  # asked last, as another thread may just have found them
        graph.audit_at = 0


def call(partition: Partition, entry: Entry, args: list[Any]) -> Sequence[Any]:
    """A call of a graph whose audit is due. Raises only what the uncaptured function raises."""
    if not runtime.record_lock.acquire(blocking=False):
        postpone(entry)
        if entry.audits.suspects:
            return partition.uncaptured(args)
        return partition.callable(args)
    try:
        outputs = None
        if is_due(entry):  # no other thread was first
            with torch.cuda.device(partition.info.device):
                take = _closer_look if entry.audits.suspects else _look
                outputs = take(partition, entry, args)
    finally:
        runtime.record_lock.release()
    return partition.callable(args) if outputs is None else outputs


def _look(partition: Partition, entry: Entry, args: list[Any]) -> Sequence[Any] | None:
    """The call's outputs; None if it has not been made, because an audit is not possible now."""
    graph, audits = entry.graph, entry.audits
    graph.audit_at = None  # other threads go on
    start = time.perf_counter()
    look = _prepare(partition, entry, args)
    if look is None:
        return None
    if not _rehearse(partition, entry, look, args):
        look.forget()
        return partition.uncaptured(args)
    give_back(look.bytes)
    kept = [args[i] for i in look.visible]
    try:
        outputs = partition.uncaptured(args)
    except BaseException as error:
        _skip(partition, entry, error)
        look.forget()
        raise
    suspects = _compare(partition, entry, look, [*outputs, *kept])
    look.forget()
    give_back(look.bytes)
    if suspects is None:
        return outputs
    audits.note_seconds(time.perf_counter() - start - look.waited)
    audits.latency = look.seconds
    if suspects:
        audits.since_good = graph.replays - 1 - audits.good_at
        audits.suspects, audits.visible = suspects, look.visible
        graph.audit_at = 0
    else:
        _note_good(entry)
    return outputs


# Errors end in these functions, so that what they hold is free before the call is made.


def _prepare(partition: Partition, entry: Entry, args: list[Any]) -> Look | None:
    try:
        look = Look(partition, entry, args)
        look.check_room()
        look.wait()
        return look
    except Exception as error:
        _skip(partition, entry, error)
        return None


def _rehearse(partition: Partition, entry: Entry, look: Look, args: list[Any]) -> bool:
    try:
        look.replay(args)
        return True
    except Exception as error:
        _skip(partition, entry, error)
        return False


def _compare(
    partition: Partition, entry: Entry, look: Look, results: Sequence[Any]
) -> list[int] | None:
    try:
        return look.differing(results)
    except Exception as error:
        _skip(partition, entry, error)
        return None


def _closer_look(partition: Partition, entry: Entry, args: list[Any]) -> Sequence[Any]:
    """The call's outputs. The graph has rested since its results were found to differ."""
    graph, audits = entry.graph, entry.audits
    before = int(graph.replays)
    start = time.perf_counter()
    run = _prepare_closer_look(partition, entry, args)
    if run is None:
        return partition.uncaptured(args)
    result = verify.verify(run, audits.suspects)
    audits.note_seconds(time.perf_counter() - start, goes_on=True)
    if result.failure:
        _drop(partition, entry, result.failure)
    else:
        audits.extra += int(graph.replays) - before - 1
        audits.suspects = ()
        _note_good(entry)
    return result.outputs


def _prepare_closer_look(partition: Partition, entry: Entry, args: list[Any]) -> verify.Run | None:
    try:
        look = Look(partition, entry, args)
        if look.visible != entry.audits.visible:
            return None  # the call gives away what the other one kept, or the reverse
        recording = Recording(
            *(entry.graph, _Released(), look.generators(args), look.given_away, entry.returned)
        )
        run = verify.Run(partition.uncaptured, args, recording, partition.written)
        return run if run.visible == look.visible else None
    except Exception as error:
        _drop(partition, entry, f"no closer look was possible: {_first_line(error)}")
        return None


def _note_good(entry: Entry) -> None:
    graph, audits = entry.graph, entry.audits
    audits.made += 1
    audits.good_at = graph.replays
    graph.audit_at = audits.due_at(graph.replays)


def _drop(partition: Partition, entry: Entry, failure: str) -> None:
    """The graph is wrong, or there is no telling that it is right."""
    audits = entry.audits
    runtime.engine().remove_graph(partition.callable, entry.graph)
    if failure.endswith(OUT_OF_MEMORY):
        audits.skipped += 1  # refused until there is memory
    else:
        audits.made += 1
        audits.failed += 1
    reason = (
        f"an audit found result {audits.suspects[0]} to differ from the uncaptured run's, "
        f"{audits.since_good} replays after the graph was last found right; {failure}"
    )
    audits.suspects = ()
    partition.refuse(entry, reason, logging.ERROR)
    for other in partition.entries.copy().values():
        if other.graph is not None and other.audits.interval != 0:
            other.graph.audit_at = 0  # what this one has met, they may have


def _skip(partition: Partition, entry: Entry, error: BaseException) -> None:
    """An audit has not come to an end."""
    graph, audits = entry.graph, entry.audits
    audits.skipped += 1
    graph.audit_at = audits.retry_at(graph.replays)
    runtime.note(logging.INFO, "%s: not audited now: %s", partition.info.name, _first_line(error))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
