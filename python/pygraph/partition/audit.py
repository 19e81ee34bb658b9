"""Audits: replays of graphs in use are compared with the uncaptured run.

A graph may become wrong after its verification (docs/explanation/audits.md). At the calls of
verify/audit_schedule.py, the uncaptured function makes the call and returns its results, and the graph
is replayed as well:

    replay    on clones of what it overwrites, its fresh outputs poisoned, on copies of the generators
    call      uncaptured, on the arguments themselves
    compare   outputs and written inputs, bit by bit

If results differ, the graph is not used, and its next call is a thorough check, as in verification
(verify/verify.py).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from pygraph import runtime, signal_exceptions
from pygraph.gpu import allocator, current
from pygraph.partition.audit_replay import AuditReplay, give_back
from pygraph.partition.host import Host
from pygraph.partition.signature import Entry, State
from pygraph.record.recorder import OUT_OF_MEMORY, Recording
from pygraph.undoing import Undo, undoing
from pygraph.verify import verify
from pygraph.verify.audit_schedule import Audits
from pygraph.verify.rehearsal import Rehearsal

if TYPE_CHECKING:
    from pygraph import _engine

_T = TypeVar("_T")
# Calls of a suspected graph that have other results than the audited call, until it is recorded anew.
_MOST_UNCHECKABLE = 8


def schedule(graph: _engine.CapturedGraph, interval: int | None, first: int = 0) -> Audits:
    """Schedules the audits of a new graph. interval: the option ``pygraph.audit``. first: how many
    calls are audited before the graph may serve one."""
    audits = Audits(interval, first, extra=graph.replays, good_at=graph.replays)
    graph.audit_at = audits.due_at(graph.replays)
    return audits


def is_due(entry: Entry) -> bool:
    """Whether the next call of the entry's graph is to be audited. A graph on trial has only those
    audits that may not wait: the trial's replays count for the schedule."""
    graph = entry.graph
    if graph is None or not graph.is_audit_due:
        return False
    return entry.state is State.CAPTURED or (entry.state is State.MEASURING and must_come_first(entry))


def must_come_first(entry: Entry) -> bool:
    """Whether the graph may serve no call before the audit that is due: it is suspected, or another one
    was found wrong; the call is one of its first, or each is to be audited."""
    graph, audits = entry.graph, entry.audits
    if graph is None:
        return False
    is_urgent = graph.audit_at == 0 or len(audits.suspects) > 0
    return is_urgent or audits.interval == 1 or audits.is_among_first(graph.replays)


def postpone(entry: Entry) -> None:
    """Postpones an audit that is due and not possible in this call, unless it must come first."""
    graph = entry.graph
    if graph is None or must_come_first(entry):
        return
    graph.audit_at = entry.audits.soon(graph.replays)
    if entry.audits.suspects:  # checked last: another thread may just have found suspects
        graph.audit_at = 0


def call(host: Host, entry: Entry, args: list[Any]) -> Sequence[Any]:
    """A call of a graph whose audit is due. Raises only what the uncaptured function raises."""

    def body(undo: Undo) -> Sequence[Any] | None:
        if not runtime.record_lock.take(undo):
            postpone(entry)
            return host.uncaptured(args) if must_come_first(entry) else None
        if not is_due(entry):
            return None  # another thread was first
        current.use_device(host.info.device, undo)
        audit = _Audit(host, entry, args)
        return audit.thorough_check() if entry.audits.suspects else audit.quick_check(undo)

    outputs = undoing(body)
    return host.callable(args) if outputs is None else outputs


@dataclasses.dataclass(frozen=True)
class _Audit:
    """The audit of one call. Updates the entry's ``audits``."""

    host: Host
    entry: Entry
    args: list[Any]

    @property
    def _graph(self) -> _engine.CapturedGraph:
        assert self.entry.graph is not None  # the record lock is held, and nothing has dropped it
        return self.entry.graph

    def quick_check(self, undo: Undo) -> Sequence[Any] | None:
        """Returns the call's outputs; None if the call was not made, because an audit is not possible
        now. undo: gets a step that makes the audit due at once, if it is interrupted."""
        graph = self._graph
        is_over = False

        def be_due() -> None:
            if not is_over and (graph.audit_at is None or self.entry.audits.suspects):
                graph.audit_at = 0

        undo.append(be_due)
        if not must_come_first(self.entry):
            graph.audit_at = None  # other threads go on
        outputs = self._quick_check()
        is_over = True
        return outputs

    def _quick_check(self) -> Sequence[Any] | None:
        audits = self.entry.audits
        start = time.perf_counter()
        replay = self._try(self._prepare)
        if replay is None:
            return None
        latency = self._try(lambda: replay.make(self.args))
        if latency is None:
            replay.forget()
            return self.host.uncaptured(self.args)
        give_back(replay.bytes)
        kept = [self.args[i] for i in replay.visible]
        try:
            outputs = undoing(self._compared_call)
        except BaseException as error:
            is_interrupt = signal_exceptions.raised_by_handler(error) is not None
            if isinstance(error, Exception) and not is_interrupt:
                self._skip(error)
            replay.forget()
            raise
        suspects = self._try(lambda: replay.differing([*outputs, *kept]))
        replay.forget()
        give_back(replay.bytes)
        if suspects is None:
            return outputs
        audits.note_seconds(time.perf_counter() - start - replay.waited)
        audits.latency = latency
        if suspects:
            audits.since_good = self._graph.replays - 1 - audits.good_at
            audits.suspects, audits.visible = suspects, replay.visible
            audits.uncheckable = 0
            self._graph.audit_at = 0
        else:
            self._note_good()
        return outputs

    def _compared_call(self, undo: Undo) -> Sequence[Any]:
        runtime.begin_comparing(undo)
        return self.host.uncaptured(self.args)

    def _try(self, step: Callable[[], _T]) -> _T | None:
        """None if it raises. Memory held by the error's frames is free before the call is made."""
        try:
            return step()
        except Exception as error:
            signal_exceptions.pass_on(error)
            self._skip(error)
            return None

    def _prepare(self) -> AuditReplay:
        replay = AuditReplay(self.host, self.entry, self.args)
        replay.check_room()
        replay.wait()
        return replay

    def thorough_check(self) -> Sequence[Any]:
        """Returns the call's outputs. The graph was not used since its results were found to differ."""
        audits = self.entry.audits
        before = self._graph.replays
        start = time.perf_counter()
        rehearsal = self._prepare_thorough_check()
        if rehearsal is None:
            return self.host.uncaptured(self.args)
        result = verify.verify(rehearsal, audits.suspects)
        audits.note_seconds(time.perf_counter() - start, goes_on=True)
        if result.is_transient:  # the next call tries again; until then no call is replayed
            audits.extra += self._graph.replays - before
        elif result.failure:
            self._drop(result.failure)
        else:
            audits.extra += self._graph.replays - before - 1
            audits.suspects = ()
            self._note_good()
        return result.outputs

    def _prepare_thorough_check(self) -> Rehearsal | None:
        try:
            replay = AuditReplay(self.host, self.entry, self.args)
            if replay.visible != self.entry.audits.visible:
                self._note_uncheckable()
                return None
            recording = Recording(
                graph=self._graph,
                pair=None,
                generators=replay.generators(self.args),
                given_away=replay.given_away,
                returned=self.entry.recording.returned,
            )
            rehearsal = Rehearsal(self.host.uncaptured, self.args, recording, self.host.written)
            return rehearsal if rehearsal.visible == replay.visible else None
        except Exception as error:
            signal_exceptions.pass_on(error)
            self._drop(f"no thorough check was possible: {runtime.brief(error)}")
            return None

    def _note_uncheckable(self) -> None:
        """The call has other results than the audited one: it gives away what that one kept, say."""
        audits = self.entry.audits
        audits.uncheckable += 1
        if audits.uncheckable == _MOST_UNCHECKABLE:
            self.host.record_anew(self.entry, self.entry.donation.is_allowed)

    def _note_good(self) -> None:
        graph, audits = self._graph, self.entry.audits
        audits.made += 1
        audits.good_at = graph.replays
        graph.audit_at = audits.due_at(graph.replays)

    def _drop(self, failure: str) -> None:
        """Drops a graph that is wrong, or that cannot be checked."""
        audits = self.entry.audits
        runtime.engine().remove_graph(self.host.callable, self._graph)
        if failure.endswith(OUT_OF_MEMORY):
            audits.skipped += 1  # refused until there is memory
        else:
            audits.made += 1
            audits.failed += 1
        reason = (
            f"an audit found result {audits.suspects[0]} to differ from the uncaptured run's, "
            f"{audits.since_good} replays after the graph was last found right; {failure}"
        )
        for other in self.host.entries.copy().values():
            if other is not self.entry and other.graph is not None and other.audits.interval != 0:
                other.graph.audit_at = 0  # the same cause may affect them
        audits.suspects = ()
        self.host.refuse(self.entry, reason, logging.ERROR)

    def _skip(self, error: BaseException) -> None:
        """An audit has not come to an end."""
        graph, audits = self._graph, self.entry.audits
        audits.skipped += 1
        graph.audit_at = audits.retry_at(graph.replays)
        if isinstance(error, torch.OutOfMemoryError):  # an uncaptured call follows
            graph.release_workspace()
            allocator.drop_blocks(self.host.info.device)
        name = self.host.info.name
        runtime.note(logging.INFO, "%s: not audited now: %s", name, runtime.brief(error))
