"""Selection for one partition: runs trials, stores decisions, and rechecks them.

Calls of a signature that arrive here, by its state, and the state afterwards:

    state         call                          next state
    MEASURING     one sample of the trial       MEASURING until the trial decides; then CAPTURED or
                                                NOT_SELECTED
    CAPTURED      one timed replay              CAPTURED; MEASURING after several out of band
    NOT_SELECTED  the first tells the engine;   NOT_SELECTED; forgotten after several out of band
                  later ones are timed
    REFUSED       the first tells the engine    REFUSED; forgotten at a later one, if memory was short
    any           PyGraph's own code raised     REFUSED

A time is *out of band* if it is longer or shorter by a factor than the one that the decision is based
on. A signature that is forgotten starts over as a new one. After a decision, the engine calls back once
per a number of calls, which the selector gives to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from pygraph import runtime, signal_exceptions
from pygraph.gpu import allocator
from pygraph.partition import audit
from pygraph.partition.host import Host
from pygraph.partition.signature import Entry, State
from pygraph.partition.timed_calls import make_room, timed_call
from pygraph.record import recorder
from pygraph.select import decision_cache
from pygraph.select.trial import REPLAYED, UNCAPTURED, Decision, Sample, Trial
from pygraph.undoing import Undo, undoing

# The number of selected graphs in a row after which further shapes need no trial.
_AGREEING_TRIALS = 3
# One call in this many is timed to recheck the decision. If its time differs from the decision's by the
# factor, several times in a row, the decision is repeated.
_CALLS_PER_RECHECK = 1000
_BAND = 1.5
_MOST_OUT_OF_BAND = 3


class Selector:
    """Handles a partition's calls from the capture of a graph to the decision, and later its rechecks.
    Callers hold the record lock, except for ``run_trial_call`` and ``recheck``, which take it, and for
    ``look_up`` for an entry that no other thread sees. Errors in measuring and storing never
    reach the program: the signature keeps its state, or runs uncaptured."""

    def __init__(self, host: Host, mode: str, lanes: int) -> None:
        """mode: the option ``pygraph.select``. lanes: that graphs may have."""
        self._host = host
        self._mode = mode
        self._lanes = lanes
        self._graphs_in_a_row = 0
        self._has_cleaned_up = False

    def load_decision(self, key: bytes, entry: Entry) -> None:
        """Loads the decision for a signature that is about to be recorded, if there is one."""
        if self._mode == "never":
            entry.deselect('the option pygraph.select is "never"')
        else:
            self.look_up(key, entry)

    def look_up(self, key: bytes, entry: Entry) -> None:
        """Loads the decision from disk, if there is one, already at a signature's first call. That call
        runs uncaptured in any case: it loads kernels and tunes, which a recording cannot."""
        if self._mode != "auto" or entry.selection.cache_key:
            return
        with runtime.harmless("looking for a selection on disk"):
            info = self._host.info
            # A graph that may not run kernels at the same time is another one, and slower.
            program = f"{info.program} lanes {self._lanes}" if info.program else ""
            entry.selection.cache_key = decision_cache.key_of(program, key, info.device)
            entry.selection.decision = decision_cache.load(entry.selection.cache_key)
        decision = entry.selection.decision
        if decision is not None and decision.selected == UNCAPTURED:
            entry.deselect(_reason(decision))

    def begin_trial_or_install(self, entry: Entry) -> None:
        """Uses the entry's verified graph, or begins its trial."""
        self._keep_suspects(entry)
        # Where each call is audited, none is replayed alone.
        is_open = (
            self._mode == "auto" and entry.selection.decision is None and entry.audits.interval != 1
        )
        with self._refusing(entry, "its selection"):
            if is_open and self._graphs_in_a_row < _AGREEING_TRIALS:
                self._begin(entry)
            else:
                self._clean_up(entry)
                self.install(entry)

    def _keep_suspects(self, entry: Entry) -> None:
        """Adds to the decision on disk the results that were not known there to be suspect."""
        decision, found = entry.selection.decision, entry.recording.have_differed
        if decision is None or found.issubset(decision.suspects):
            return
        suspects = tuple(sorted(found.union(decision.suspects)))
        entry.selection.decision = decision = dataclasses.replace(decision, suspects=suspects)
        with runtime.harmless("keeping suspects on disk"):
            decision_cache.save(entry.selection.cache_key, decision)

    def install(self, entry: Entry) -> None:
        """Lets the engine replay the entry's graph, until a recheck is due."""
        assert entry.graph is not None
        calls = _CALLS_PER_RECHECK if entry.selection.decision is not None else 0
        self._host.install(entry.graph, calls)

    # Trials.

    def run_trial_call(self, key: bytes, entry: Entry, args: list[Any]) -> Sequence[Any]:
        """One call of a trial."""

        def body(undo: Undo) -> Sequence[Any]:
            if not runtime.record_lock.take(undo):
                return self._host.uncaptured(args)  # another thread measures or records
            # Another thread may have decided, or have found this graph or another one wrong, meanwhile.
            if entry.selection.trial is None or entry.audits.suspects or audit.is_due(entry):
                return self._host.uncaptured(args)
            if runtime.engine().needs_new_executable():  # for a profile: replays are slow
                return self._host.uncaptured(args)
            return self._try(key, entry, entry.selection.trial, args)

        return undoing(body)

    def _begin(self, entry: Entry) -> None:
        """Begins a trial. Until it ends, the engine does not replay the graph."""
        self._remove_graph(entry)
        entry.measure(Trial({UNCAPTURED: 0, REPLAYED: entry.persistent_bytes}))
        self._host.note_trial(entry)

    def _try(self, key: bytes, entry: Entry, trial: Trial, args: list[Any]) -> Sequence[Any]:
        with runtime.harmless("making room for a trial"):
            if entry.graph is not None:
                make_room(self._host, entry.graph, trial)
        outputs, sample = timed_call(self._host, entry, trial.variant, args, trial.sleep)
        if sample is None:
            return outputs
        with self._refusing(entry, "its trial"):
            decision = trial.add(sample)
            if decision is not None:
                self._decide(key, entry, decision)
        return outputs

    def _decide(self, key: bytes, entry: Entry, decision: Decision) -> None:
        reason = _reason(decision) if decision.selected == UNCAPTURED else ""
        graph = entry.graph
        entry.decide(decision, reason)
        with runtime.harmless("keeping a selection on disk"):
            kept = dataclasses.replace(
                decision,
                written=tuple(sorted(self._host.written)),
                draws=self._host.draws,
                branches=None if graph is None else graph.lanes > 1,
                suspects=tuple(sorted(entry.recording.have_differed)),
            )
            decision_cache.save(entry.selection.cache_key, kept)
        text = "%s: %s is selected: %s"
        name = self._host.info.name
        runtime.note(logging.INFO, text, name, decision.selected, decision.timings)
        if reason:
            self._graphs_in_a_row = 0
            return
        self._graphs_in_a_row += 1
        self._clean_up(entry)
        if self._host.entries.get(key) is entry:  # not reset meanwhile
            self.install(entry)

    def _clean_up(self, entry: Entry) -> None:
        """Empties the allocator's cache when a graph is to stay. (A program that stays uncaptured would
        allocate the same pieces again.)"""
        graph = entry.graph
        assert graph is not None
        with runtime.harmless("freeing what compilation has left"):
            allocator.free_library_workspaces()
            if self._has_cleaned_up:  # later shapes come while the program is under way
                allocator.give_back(after=graph.output_bytes + graph.block_bytes)
            else:
                allocator.give_back_all()
                self._has_cleaned_up = True
        with runtime.harmless("settling a graph's workspace"):
            if self._host.info.is_whole:
                allocator.hold_blocks(graph, self._host.info.device)
            allocator.defragment_workspace(graph)

    # Rechecks.

    def recheck(self, key: bytes, entry: Entry, args: list[Any]) -> Sequence[Any]:
        """Makes a call whose decision is to be rechecked, or that the engine does not know yet."""

        def body(undo: Undo) -> Sequence[Any]:
            if not runtime.record_lock.take(undo):
                return self._host.uncaptured(args)  # still due at the next call
            # Another thread may have begun a trial, or have found a graph wrong, meanwhile.
            is_on_its_way = entry.state in (State.MEASURING, State.UNCAPTURED)
            if is_on_its_way or entry.audits.suspects or audit.is_due(entry):
                return self._host.uncaptured(args)
            return self._recheck(key, entry, args)

        return undoing(body)

    def _recheck(self, key: bytes, entry: Entry, args: list[Any]) -> Sequence[Any]:
        variant = ""  # nothing to compare with
        with self._refusing(entry, "a recheck of its selection"):
            if entry.state is State.CAPTURED:
                self.install(entry)
                entry.selection.rechecks += 1
                variant = REPLAYED if entry.selection.decision is not None else ""
            else:
                variant = self._recheck_uncaptured(key, entry, args)
        if not variant:
            return self._host.uncaptured(args)
        outputs, sample = timed_call(self._host, entry, variant, args, sleep=0.0)
        if sample is not None:
            with self._refusing(entry, "a recheck of its selection"):
                self._compare(key, entry, variant, sample)
        return outputs

    def _recheck_uncaptured(self, key: bytes, entry: Entry, args: list[Any]) -> str:
        """The variant to time; empty if there is nothing to compare with."""
        is_first = entry.selection.rechecks == 0
        is_decided = entry.selection.decision is not None
        if is_first or is_decided:
            calls = _CALLS_PER_RECHECK if is_decided else entry.calls_until_retry
            runtime.engine().add_uncaptured_decision(self._host.callable, args, calls)
        entry.selection.rechecks += 1
        if is_first:
            return ""
        if entry.calls_until_retry > 0:
            self._forget(key)
            return ""
        return UNCAPTURED if is_decided else ""

    def _compare(self, key: bytes, entry: Entry, variant: str, sample: Sample) -> None:
        """Repeats the decision if times have changed."""
        selection = entry.selection
        decision = selection.decision
        if decision is None or variant not in decision.timings or sample.latency is None:
            return
        if runtime.engine().needs_new_executable():  # for a profile: replays are slow
            return
        measured = decision.timings[variant].latency
        is_in_band = measured / _BAND < sample.latency < measured * _BAND
        selection.out_of_band = 0 if is_in_band else selection.out_of_band + 1
        if selection.out_of_band >= _MOST_OUT_OF_BAND:
            self._decide_anew(key, entry)

    def _decide_anew(self, key: bytes, entry: Entry) -> None:
        text = "%s: its time has left the band that was measured"
        runtime.note(logging.INFO, text, self._host.info.name)
        with runtime.harmless("forgetting a selection on disk"):
            decision_cache.forget(entry.selection.cache_key)
        entry.selection.decision, entry.selection.out_of_band = None, 0
        self._graphs_in_a_row = 0
        if entry.state is State.CAPTURED:
            self._begin(entry)
        else:
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        """Lets a signature that runs uncaptured be recorded again."""
        runtime.engine().clear_uncaptured_decisions(self._host.callable)
        self._host.entries.pop(key, None)
        for entry in self._host.entries.copy().values():
            entry.selection.rechecks = 0  # the engine is to be told of the others again

    # Failures.

    @contextlib.contextmanager
    def _refusing(self, entry: Entry, what: str) -> Iterator[None]:
        """Turns an internal error into a refusal of the signature."""
        try:
            yield
        except Exception as error:
            signal_exceptions.pass_on(error)
            if entry.graph is not None:
                self._remove_graph(entry)
            self._host.refuse(entry, f"{what} failed with {recorder.describe_failure(error)}")

    def _remove_graph(self, entry: Entry) -> None:
        assert entry.graph is not None
        runtime.engine().remove_graph(self._host.callable, entry.graph)


def _reason(decision: Decision) -> str:
    """Why no graph was selected."""
    uncaptured, graph = decision.timings[UNCAPTURED], decision.timings[REPLAYED]
    return (
        f"a graph gains nothing here: {graph.period * 1e6:.0f} us per call, "
        f"uncaptured {uncaptured.period * 1e6:.0f} us"
    )
