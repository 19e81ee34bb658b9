"""One partition of a compiled program: when it runs uncaptured, when it is recorded.

Per signature of the arguments (shapes, strides, dtypes, integers, alignment classes):

    call 0   uncaptured; loads kernels, tunes; sees which inputs are written and whether it draws
    call 1   recorded twice, linked, verified against the uncaptured run
    call 2+  on trial: uncaptured and replayed in turns, until one is known to be faster (selection.py)
    then     replayed by the engine, or run uncaptured; this file is not involved, but for a look at
             whether the times still are what they were

Whatever goes wrong in call 1 leaves the signature uncaptured for good, with the reason kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo  # before torch._functorch, which imports it in a circle
from torch._functorch._aot_autograd.runtime_wrappers import _AnalyzeCustomOpInputOutputMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pygraph import decisions, observe, recorder, runtime, selection, verify
from pygraph.entry import Entry, PartitionInfo, State
from pygraph.options import Options

log = logging.getLogger("pygraph")

Function = Callable[[list[Any]], Sequence[Any]]

# Signatures remembered after one call. Shapes that never come back must not fill the memory.
_MAX_SEEN = 4096
# So many signatures are recorded at their second call; for the others a recording must first have
# been worth it, see _is_worth_recording. Integer arguments mean that the compiler was told, or has
# seen, that shapes vary.
_RECORDED_AT_ONCE = 2
_RECORDED_AT_ONCE_IF_DYNAMIC = 0
_ASSUMED_RECORDING_SECONDS = 0.05  # before the first recording has shown what it takes
# After so many graphs in a row that were selected, further shapes need no trial.
_AGREEING_TRIALS = 3
# A decision is looked at once in so many calls: one call is timed. Where its time is another than
# when it was decided, by this factor and several times in a row, the decision is made anew.
_CALLS_PER_LOOK = 1000
_BAND = 1.5
_LOOKS_OUTSIDE = 3


class Partition:
    """Decides for one partition function; ``callable`` goes in its place."""

    def __init__(self, function: Function, info: PartitionInfo, options: Options) -> None:
        self.info = info
        self.entries: dict[bytes, Entry] = {}
        self._function = function
        self._options = options
        self._recordings = 0
        self._recording_seconds = 0.0
        self._dropped = 0  # graphs that made room for others
        self._graphs_in_a_row = 0  # trials that a graph has won, since one was lost
        self._generation = 0  # counts resets
        # Side effects of the function, as seen in its first calls.
        self._watched = 0
        self._mutated: frozenset[int] = frozenset()
        self._draws = False
        uncaptured = self._uncaptured if info.on_host else function
        self.callable = runtime.engine().graphed_callable(uncaptured, self._miss, info.device)
        # The callable keeps this object alive through the bound method; else only a report does.
        runtime.partitions.add(self)
        observation = observe.current()
        if observation is not None:
            observation.partitions.append(self)

    def reset(self) -> None:
        """Drops the captured graphs; the next calls start over."""
        runtime.engine().clear_decided(self.callable)
        self.entries.clear()
        self._recordings = 0
        self._recording_seconds = 0.0
        self._dropped = 0
        self._graphs_in_a_row = 0
        self._generation += 1

    def _uncaptured(self, args: list[Any]) -> Sequence[Any]:
        """Runs the function itself.

        Attention with dropout keeps its random state on the CPU when it runs uncaptured and on the
        GPU while capturing; its backward reads it on the host or the device accordingly. What a
        captured forward saved must therefore move before an uncaptured backward.
        """
        if self.info.on_host and not torch.cuda.is_current_stream_capturing():
            for i in self.info.on_host:
                args[i] = args[i].cpu()
        return self._function(args)

    def _miss(self, args: list[Any]) -> Sequence[Any]:
        """Called by the engine when nothing is decided for the arguments, or a look is due."""
        if torch.autograd.profiler._is_profiler_enabled:
            return self._uncaptured(args)  # recording would take the profiler's place
        modes = _get_current_dispatch_mode_stack()
        if any(not isinstance(mode, _AnalyzeCustomOpInputOutputMode) for mode in modes):
            return self._uncaptured(args)
        if any(not args[i].is_cuda for i in self.info.on_host):
            return self._uncaptured(args)  # saved by a forward that is not captured yet
        key = runtime.engine().signature(args, self.info.device)
        entry = self.entries.get(key)
        if entry is None:
            return self._first_call(key, args)
        if modes:
            return self._uncaptured(args)
        if entry.state is State.MEASURING:
            return self._try(key, entry, args)
        if entry.state is not State.UNCAPTURED:
            return self._look_again(key, entry, args)
        if self._is_worth_recording(entry):
            return self._capture(entry, args)
        start = time.perf_counter()
        outputs = self._uncaptured(args)
        entry.uncaptured_seconds += time.perf_counter() - start
        return outputs

    def _is_worth_recording(self, entry: Entry) -> bool:
        """Whether the signature has cost as much uncaptured as a recording would.

        Nobody knows how often a shape will come back. Recording it once that has cost what the
        recording costs is never more than twice as slow as knowing the future.
        """
        if self._recordings < (
            _RECORDED_AT_ONCE_IF_DYNAMIC if entry.has_numbers else _RECORDED_AT_ONCE
        ):
            return True
        price = _ASSUMED_RECORDING_SECONDS
        if self._recordings > 0:
            price = self._recording_seconds / self._recordings
        # Each time that all kept graphs were pushed out by others, recording has paid less.
        turnovers = min(self._dropped // self._options.max_graphs, 60)
        return entry.uncaptured_seconds >= price * (1 << turnovers)

    def _first_call(self, key: bytes, args: list[Any]) -> Sequence[Any]:
        if len(self.entries) >= _MAX_SEEN:
            self._forget_uncaptured()
        entry = self._new_entry(key, args)
        if self._watched >= _RECORDED_AT_ONCE or entry.state is not State.UNCAPTURED:
            # The same code with other sizes writes the same inputs; watching it costs time.
            outputs = self._uncaptured(args)
        else:
            self._watched += 1
            watch = verify.SideEffects(args, self.info.device)
            if self._hints_fit(args):
                self._mutated |= self.info.mutated
            outputs = self._uncaptured(args)
            self._mutated |= watch.mutated()
            self._draws |= watch.draws()
        self.entries[key] = entry
        return outputs

    def _new_entry(self, key: bytes, args: Sequence[Any]) -> Entry:
        has_numbers = any(isinstance(arg, int) for arg in args)
        entry = Entry(copied_bytes=self._copied_bytes(args), has_numbers=has_numbers)
        if self._options.select == "never":
            entry.state, entry.reason = State.NOT_SELECTED, 'the option pygraph.select is "never"'
        elif self._options.select == "auto":
            entry.key = decisions.key_of(self.info.program, key, self.info.device)
            entry.decision = decisions.load(entry.key)
            if entry.decision is not None and entry.decision.selected == selection.UNCAPTURED:
                entry.state, entry.reason = State.NOT_SELECTED, _reason(entry.decision)
        return entry

    def _capture(self, entry: Entry, args: list[Any]) -> Sequence[Any]:
        if not runtime.record_lock.acquire(blocking=False):
            return self._uncaptured(args)  # another thread records; next time
        start = time.perf_counter()
        try:
            with torch.cuda.device(self.info.device):
                return self._record_and_verify(entry, args)
        finally:
            self._recordings += 1
            self._recording_seconds += time.perf_counter() - start
            runtime.record_lock.release()

    def _record_and_verify(self, entry: Entry, args: list[Any]) -> Sequence[Any]:
        start = time.perf_counter()
        generation = self._generation
        try:
            donated = runtime.engine().given_away(args) if self.info.is_backward else []
            recording = recorder.record(
                self._function,
                args,
                self.info.device,
                draws=self._draws,
                saved=self.info.saved,
                donated=donated,
                capacity=self._options.record_capacity_gib << 30,
            )
            if self._options.verify:
                run = verify.Run(self._uncaptured, args, recording, self._mutated)
        except Exception as error:  # any failure of a recording leaves the program uncaptured
            self._refuse(entry, recorder.describe_failure(error))
            return self._uncaptured(args)
        if self._options.verify:
            result = verify.verify(run, compare_bits=entry.compare_bits)
            outputs = result.outputs
            entry.executable_bytes = result.executable_bytes
            if result.undecided:
                entry.compare_bits = True
                return outputs
            if result.failure:
                self._refuse(entry, result.failure)
                return outputs
        elif recording.graph.unexplained_words > 0:
            self._refuse(entry, "some parameters look like unknown addresses, and verify is off")
            return self._uncaptured(args)
        else:
            try:
                outputs = recording.graph.replay(args, False)
            except RuntimeError as error:  # nothing was launched
                self._refuse(entry, recorder.describe_failure(error))
                return self._uncaptured(args)
        args.clear()
        entry.graph = recording.graph
        entry.capture_seconds = time.perf_counter() - start
        entry.state = State.CAPTURED
        if self._needs_trial(entry):
            self._start_trial(entry)
        elif generation == self._generation:
            self._keep(recording.graph)
        log.info(
            "%s: captured %d nodes, %d relocations, in %.0f ms",
            self.info.name,
            entry.graph.nodes,
            entry.graph.relocations,
            entry.capture_seconds * 1e3,
        )
        return outputs

    def _needs_trial(self, entry: Entry) -> bool:
        return (
            self._options.select == "auto"
            and entry.decision is None
            and self._graphs_in_a_row < _AGREEING_TRIALS
        )

    def _start_trial(self, entry: Entry) -> None:
        kept = entry.graph.workspace_bytes + entry.executable_bytes
        entry.state = State.MEASURING
        entry.trial = selection.Trial({selection.UNCAPTURED: 0, selection.REPLAYED: kept})

    def _try(self, key: bytes, entry: Entry, args: list[Any]) -> Sequence[Any]:
        """One call of a trial."""
        if not runtime.record_lock.acquire(blocking=False):
            return self._uncaptured(args)  # another thread measures or records
        try:
            trial = entry.trial
            if trial is None:  # decided by another thread meanwhile
                return self._uncaptured(args)
            outputs, sample = self._timed(entry, trial.variant, args, trial.sleep)
            decision = trial.add(sample) if sample is not None else None
            if decision is not None:
                self._decide(key, entry, decision)
            return outputs
        finally:
            runtime.record_lock.release()

    def _timed(
        self, entry: Entry, variant: str, args: list[Any], sleep: float
    ) -> tuple[Sequence[Any], selection.Sample | None]:
        """Runs a variant. No sample if it was a replay that failed, and the call ran uncaptured."""
        with torch.cuda.device(self.info.device):
            if variant == selection.UNCAPTURED:
                return selection.timed(lambda: self._uncaptured(args), sleep)
            try:
                outputs, sample = selection.timed(lambda: entry.graph.replay(args, True), sleep)
                args.clear()
                return outputs, sample
            except torch.OutOfMemoryError:
                pass  # this call only: uncaptured, the same request may free caches or raise
            except RuntimeError as error:  # nothing was launched
                self._refuse(entry, recorder.describe_failure(error))
            return self._uncaptured(args), None

    def _decide(self, key: bytes, entry: Entry, decision: selection.Decision) -> None:
        entry.trial = None
        entry.decision = decision
        decisions.save(entry.key, decision)
        log.info("%s: %s is selected: %s", self.info.name, decision.selected, decision.timings)
        if decision.selected == selection.UNCAPTURED:
            self._graphs_in_a_row = 0
            entry.state, entry.reason, entry.graph = State.NOT_SELECTED, _reason(decision), None
        else:
            self._graphs_in_a_row += 1
            entry.state = State.CAPTURED
            if self.entries.get(key) is entry:  # not reset meanwhile
                self._keep(entry.graph)

    def _look_again(self, key: bytes, entry: Entry, args: list[Any]) -> Sequence[Any]:
        """A call with a decision that came here: a look is due, or the engine does not know it."""
        engine = runtime.engine()
        is_graph = entry.state is State.CAPTURED
        calls_per_look = _CALLS_PER_LOOK if entry.decision is not None else 0
        if is_graph:
            self._keep(entry.graph)
        else:
            engine.add_without_graph(self.callable, args, calls_per_look)
        if not entry.looks and not is_graph:
            entry.looks = 1  # that was to make it known
            return self._uncaptured(args)
        if entry.decision is None or not runtime.record_lock.acquire(blocking=False):
            return self._uncaptured(args)
        try:
            entry.looks += 1
            variant = entry.decision.selected
            outputs, sample = self._timed(entry, variant, args, sleep=0.0)
        finally:
            runtime.record_lock.release()
        before = entry.decision.timings[variant].latency
        if sample is None or sample.latency is None:
            return outputs
        is_outside = not before / _BAND < sample.latency < before * _BAND
        entry.looks_outside = entry.looks_outside + 1 if is_outside else 0
        if entry.looks_outside >= _LOOKS_OUTSIDE:
            self._decide_anew(key, entry)
        return outputs

    def _decide_anew(self, key: bytes, entry: Entry) -> None:
        log.info("%s: its time has left the band that was measured", self.info.name)
        decisions.forget(entry.key)
        entry.decision, entry.looks_outside = None, 0
        if entry.state is State.CAPTURED:
            runtime.engine().remove_graph(self.callable, entry.graph)
            self._start_trial(entry)
        else:
            runtime.engine().clear_without_graph(self.callable)
            self.entries.pop(key, None)  # recorded anew

    def _keep(self, graph: Any) -> None:
        looks = _CALLS_PER_LOOK if self._options.select == "auto" else 0
        dropped = runtime.engine().add_graph(self.callable, graph, self._options.max_graphs, looks)
        self._dropped += len(dropped)
        for old in dropped:
            for key, entry in list(self.entries.items()):
                if entry.graph is old:
                    del self.entries[key]

    def _refuse(self, entry: Entry, reason: str) -> None:
        if entry.state is not State.REFUSED or entry.reason != reason:
            log.warning("%s stays uncaptured: %s", self.info.name, reason)
        entry.state = State.REFUSED
        entry.reason = reason
        entry.graph = None
        entry.trial = entry.decision = None

    def _forget_uncaptured(self) -> None:
        for key, entry in list(self.entries.items()):
            if entry.state is State.UNCAPTURED:
                del self.entries[key]

    def _hints_fit(self, args: Sequence[Any]) -> bool:
        # PyTorch 2.11 may drop arguments after it made its maps, which shifts every hint.
        numbers = 0 if self.info.counts_numbers else sum(isinstance(arg, int) for arg in args)
        return len(args) - numbers == self.info.argument_count

    def _copied_bytes(self, args: Sequence[Any]) -> int:
        static = self.info.static if self._hints_fit(args) else frozenset()
        return sum(
            arg.nbytes
            for i, arg in enumerate(args)
            if isinstance(arg, torch.Tensor) and arg.is_cuda and i not in static
        )


def _reason(decision: selection.Decision) -> str:
    """Why a graph was not selected."""
    uncaptured = decision.timings[selection.UNCAPTURED]
    graph = min(
        (t for n, t in decision.timings.items() if n != selection.UNCAPTURED), key=lambda t: t.period
    )
    return (
        f"a graph gains nothing here: {graph.period * 1e6:.0f} us per call, "
        f"uncaptured {uncaptured.period * 1e6:.0f} us"
    )
