"""Selection for one partition: runs trials, keeps decisions, looks at them again now and then."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pygraph import runtime
from pygraph.gpu import allocator
from pygraph.partition import device_patching
from pygraph.partition.signature import Entry, State
from pygraph.record import recorder
from pygraph.select import decision_cache
from pygraph.select.trial import PATCHED_ON_DEVICE, UNCAPTURED, Decision, Sample, Trial, timed

if TYPE_CHECKING:
    from pygraph.partition.partition import Partition

# After so many graphs in a row that were selected, further shapes need no trial.
_AGREEING_TRIALS = 3
# A decision is looked at once in so many calls: one call is timed. Where its time is another than
# when it was decided, by this factor and several times in a row, the decision is made anew.
_CALLS_PER_LOOK = 1000
_CALLS_UNTIL_COUNT = 50  # of the first looks, where the device might patch the graph
_BAND = 1.5
_LOOKS_OUTSIDE = 3


class Selector:
    """Takes a partition's calls from the moment that a graph was captured to the decision, and later
    those that look at it. Whoever calls it holds the record lock, but for ``run`` and ``look``, which
    take it. What it measures, keeps on disk or cleans up never ends a call: where that fails, the
    signature goes on as it is, or uncaptured."""

    def __init__(self, partition: Partition, mode: str) -> None:
        """mode: the option ``pygraph.select``."""
        self._partition = partition
        self._mode = mode
        self._graphs_in_a_row = 0
        self._has_cleaned_up = False

    def recall(self, key: bytes, entry: Entry) -> None:
        """A signature is worth recording: is it known already that a graph is not wanted?"""
        if self._mode == "never":
            entry.state, entry.reason = State.NOT_SELECTED, 'the option pygraph.select is "never"'
        elif self._mode == "auto" and not entry.key:
            with runtime.harmless("looking for a selection on disk"):
                self._load(key, entry)
            if entry.decision is not None and entry.decision.selected == UNCAPTURED:
                entry.state, entry.reason = State.NOT_SELECTED, _reason(entry.decision)

    def _load(self, key: bytes, entry: Entry) -> None:
        info = self._partition.info
        entry.key = decision_cache.key_of(info.program, key, info.device)
        entry.decision = decision_cache.load(entry.key)

    def captured(self, entry: Entry) -> None:
        """The entry has a verified graph: to be used, or to be tried."""
        is_open = self._mode == "auto" and entry.decision is None
        with self._refusing(entry, "its selection"):
            if is_open and self._graphs_in_a_row < _AGREEING_TRIALS:
                self._begin(entry, _first_trial(entry))
            else:
                self._clean_up(entry)
                self.keep(entry)

    def run(self, key: bytes, entry: Entry, args: list[Any]) -> Sequence[Any]:
        """One call of a trial."""
        if not runtime.record_lock.acquire(blocking=False):
            return self._partition.uncaptured(args)  # another thread measures or records
        try:
            if entry.trial is None:  # decided by another thread meanwhile
                return self._partition.uncaptured(args)
            return self._try(key, entry, entry.trial, args)
        finally:
            runtime.record_lock.release()

    def _try(self, key: bytes, entry: Entry, trial: Trial, args: list[Any]) -> Sequence[Any]:
        with runtime.harmless("making room for a trial"):
            self._make_room(entry, trial)
        outputs, sample = self._timed(entry, trial.variant, args, trial.sleep)
        if sample is None:
            return outputs
        with self._refusing(entry, "its trial"):
            decision = trial.add(sample)
            if decision is not None:
                self._decide(key, entry, decision)
        return outputs

    def _make_room(self, entry: Entry, trial: Trial) -> None:
        graph = entry.graph
        with torch.cuda.device(self._partition.info.device):
            wanted = graph.output_bytes + graph.block_bytes + graph.workspace_bytes
            is_short = not allocator.make_room(wanted)
        if is_short and trial.variant == UNCAPTURED:
            graph.release_workspace()

    @contextlib.contextmanager
    def _refusing(self, entry: Entry, what: str) -> Iterator[None]:
        """Lets the signature run uncaptured for good where something fails that must not."""
        try:
            yield
        except Exception as error:
            if entry.graph is not None:
                runtime.engine().remove_graph(self._partition.callable, entry.graph)
            self._partition.refuse(entry, f"{what} failed with {recorder.describe_failure(error)}")

    def look(self, key: bytes, entry: Entry, args: list[Any]) -> Sequence[Any]:
        """A call whose decision is due for a look, or that the engine does not know yet."""
        if not runtime.record_lock.acquire(blocking=False):
            return self._partition.uncaptured(args)  # still due at the next call
        try:
            # Another thread may have begun a trial, or have found the graph suspect, meanwhile.
            if entry.state in (State.MEASURING, State.UNCAPTURED) or entry.audits.suspects:
                return self._partition.uncaptured(args)
            return self._look(key, entry, args)
        finally:
            runtime.record_lock.release()

    def _look(self, key: bytes, entry: Entry, args: list[Any]) -> Sequence[Any]:
        found: Trial | str | None = None
        with self._refusing(entry, "a look at its selection"):
            found = self._prepare_look(key, entry, args)
            if isinstance(found, Trial):
                self._begin(entry, found)
        if entry.trial is not None:
            return self._try(key, entry, entry.trial, args)
        if not isinstance(found, str):
            return self._partition.uncaptured(args)
        outputs, sample = self._timed(entry, found, args, sleep=0.0)
        if sample is not None:
            with self._refusing(entry, "a look at its selection"):
                self._compare(key, entry, found, sample)
        return outputs

    def _prepare_look(self, key: bytes, entry: Entry, args: list[Any]) -> Trial | str | None:
        """The variant to look at, or a trial that is to be made. None: the call goes uncaptured."""
        has_graph = entry.state is State.CAPTURED
        is_new = entry.looks == 0 and not has_graph
        touched = 0.0
        if has_graph:
            touched = device_patching.count(entry)
            self.keep(entry)
        elif is_new or entry.decision is not None:
            looks = _CALLS_PER_LOOK if entry.decision is not None else entry.calls_until_retry
            runtime.engine().add_without_graph(self._partition.callable, args, looks)
        entry.looks += 1
        decision = entry.decision
        if entry.calls_until_retry > 0 and not is_new:
            self._forget(key)
            return None
        if is_new or decision is None:
            return None
        if has_graph and device_patching.is_open(entry):
            trial = device_patching.consider(self._partition, entry, decision, args, touched)
            if trial is not None:
                return trial
            if entry.graph is None:  # given up
                return None
        return device_patching.form_of(entry.graph) if has_graph else UNCAPTURED

    def _compare(self, key: bytes, entry: Entry, variant: str, sample: Sample) -> None:
        """Makes a decision anew where times are no longer what they were."""
        if entry.decision is None or variant not in entry.decision.timings or sample.latency is None:
            return
        measured = entry.decision.timings[variant].latency
        is_outside = not measured / _BAND < sample.latency < measured * _BAND
        entry.looks_outside = entry.looks_outside + 1 if is_outside else 0
        if entry.looks_outside >= _LOOKS_OUTSIDE:
            self._decide_anew(key, entry)

    def _begin(self, entry: Entry, trial: Trial) -> None:
        """The graph is on trial from now on, and not the engine's."""
        runtime.engine().remove_graph(self._partition.callable, entry.graph)
        entry.state, entry.trial = State.MEASURING, trial

    def _timed(
        self, entry: Entry, variant: str, args: list[Any], sleep: float
    ) -> tuple[Sequence[Any], Sample | None]:
        """Runs a variant. No sample if it was a replay that failed, and the call ran uncaptured, or if
        nothing could be measured."""
        has_room = True
        with torch.cuda.device(self._partition.info.device):
            if variant == UNCAPTURED:
                return _measured(lambda: self._partition.uncaptured(args), sleep)
            try:
                entry.graph.patch_on_device(variant == PATCHED_ON_DEVICE)
                outputs, sample = _measured(lambda: entry.graph.replay(args, True), sleep)
                args.clear()
                return outputs, sample
            except torch.OutOfMemoryError:
                has_room = False
            except (runtime.engine().StreamNotReady, runtime.engine().NotGivenAway):
                pass  # this call only
            except Exception as error:  # nothing was launched
                runtime.engine().remove_graph(self._partition.callable, entry.graph)
                self._partition.refuse(entry, recorder.describe_failure(error))
            if not has_room:
                self._note_no_room(entry)
            return self._partition.uncaptured(args), None

    def _note_no_room(self, entry: Entry) -> None:
        """A replay found no memory: what the graph itself keeps is for the uncaptured run. A trial ends
        where it is not the first time."""
        entry.graph.release_workspace()
        if entry.trial is not None and entry.trial.note_no_room():
            self._partition.refuse(entry, f"its replays {recorder.OUT_OF_MEMORY}")

    def _decide(self, key: bytes, entry: Entry, decision: Decision) -> None:
        is_second = entry.decision is not None  # of two forms of a graph that was selected
        if entry.decision is not None:
            timings = {**entry.decision.timings, **decision.timings}
            decision = Decision(decision.selected, timings)
        entry.trial, entry.decision = None, decision
        with runtime.harmless("keeping a selection on disk"):
            decision_cache.save(entry.key, decision)
        runtime.note(
            logging.INFO,
            "%s: %s is selected: %s",
            *(self._partition.info.name, decision.selected, decision.timings),
        )
        if decision.selected == UNCAPTURED:
            self._graphs_in_a_row = 0
            entry.state, entry.reason, entry.graph = State.NOT_SELECTED, _reason(decision), None
            return
        entry.state = State.CAPTURED
        if is_second:
            device_patching.settle(self._partition, entry, decision.selected)
        else:
            self._graphs_in_a_row += 1
            self._clean_up(entry)
        # Not reset meanwhile, nor given up.
        if self._partition.entries.get(key) is entry and entry.graph is not None:
            self.keep(entry)

    def _clean_up(self, entry: Entry) -> None:
        """Frees what compilation, verification and uncaptured calls have left, as the graph stays. (A
        program that goes on uncaptured would take the same pieces again.)"""
        with runtime.harmless("freeing what compilation has left"):
            allocator.free_library_workspaces()
            if self._has_cleaned_up:  # later shapes come while the program is under way
                allocator.give_back(after=entry.graph.output_bytes + entry.graph.block_bytes)
            else:
                allocator.give_back_all()
                self._has_cleaned_up = True
        with runtime.harmless("settling a graph's workspace"):
            allocator.settle(entry.graph)

    def _decide_anew(self, key: bytes, entry: Entry) -> None:
        partition = self._partition
        text = "%s: its time has left the band that was measured"
        runtime.note(logging.INFO, text, partition.info.name)
        with runtime.harmless("forgetting a selection on disk"):
            decision_cache.forget(entry.key)
        entry.decision, entry.looks_outside = None, 0
        self._graphs_in_a_row = 0
        if entry.state is State.CAPTURED:
            self._begin(entry, _first_trial(entry))
        else:
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        """Lets a signature that runs uncaptured be recorded anew."""
        runtime.engine().clear_without_graph(self._partition.callable)
        self._partition.entries.pop(key, None)
        for entry in self._partition.entries.copy().values():
            entry.looks = 0  # the engine is to be told of the others again

    def keep(self, entry: Entry) -> None:
        """Lets the engine replay the entry's graph, until a look is due."""
        calls = 0
        if entry.decision is not None:
            is_early = entry.looks == 0 and device_patching.is_open(entry)
            calls = _CALLS_UNTIL_COUNT if is_early else _CALLS_PER_LOOK
            device_patching.count(entry)
        self._partition.keep(entry.graph, calls)


def _measured(run: Callable[[], Sequence[Any]], sleep: float) -> tuple[Sequence[Any], Sample | None]:
    """As ``timed``; but where it is the measuring that fails, the call is made all the same."""
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
        runtime.note(logging.WARNING, "a call could not be timed: %s", error)
    return (results[0] if results else run()), None


def _first_trial(entry: Entry) -> Trial:
    return Trial({UNCAPTURED: 0, device_patching.form_of(entry.graph): entry.kept_bytes})


def _reason(decision: Decision) -> str:
    """Why no graph was selected."""
    uncaptured = decision.timings[UNCAPTURED]
    graph = min(
        (timing for name, timing in decision.timings.items() if name != UNCAPTURED),
        key=lambda timing: timing.period,
    )
    return (
        f"a graph gains nothing here: {graph.period * 1e6:.0f} us per call, "
        f"uncaptured {uncaptured.period * 1e6:.0f} us"
    )
