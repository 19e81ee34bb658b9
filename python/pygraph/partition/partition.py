"""One partition of a compiled program: when it runs uncaptured, when it is recorded.

Per signature of the arguments (shapes, strides, dtypes, numbers, alignment classes, and PyTorch's
switches):

    call 1   uncaptured; loads kernels, tunes; sees what inputs change and whether it draws
    call 2   recorded twice, which tells what may be written; linked, verified against an uncaptured run
             (pipeline.py)
    call 3+  on trial: uncaptured and replayed in turns, until one is known to be faster (selector.py)
    then     replayed by the engine, or run uncaptured, without this file; now and then the engine calls
             it to check the times (selector.py) and the results (audit.py) again

If shapes vary, the engine first runs calls uncaptured until they have used as much time as a recording
(recording_policy.py).

Threads: the thread that records, times, audits or drops a graph holds runtime.record_lock; other
threads run uncaptured. Only the holder changes an entry that has a graph. A reset does not wait for the
lock: graphs of entries that it dropped are not installed (``install``).
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # before torch._functorch, which imports it in a circle
from torch._functorch._aot_autograd.runtime_wrappers import _AnalyzeCustomOpInputOutputMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pygraph import observations, runtime
from pygraph.gpu import allocator
from pygraph.options import Options
from pygraph.partition import audit, tuple_arguments, unservable_calls
from pygraph.partition.call import Function
from pygraph.partition.observed_effects import ObservedEffects
from pygraph.partition.pipeline import Pipeline
from pygraph.partition.recording_policy import RecordingPolicy
from pygraph.partition.selector import Selector
from pygraph.partition.signature import Entry, PartitionInfo, RecordingState, State
from pygraph.record.recorder import OUT_OF_MEMORY
from pygraph.uncapturable import Compilation
from pygraph.undoing import Undo, undoing

if TYPE_CHECKING:
    from pygraph import _engine

# Signatures remembered after one call. Shapes that do not repeat must not fill the memory.
_MAX_SEEN = 4096
# Graphs that may be on trial at a time, if the option ``max_graphs`` allows fewer.
_LEAST_TRIALS = 8


class Partition:
    """Decides how each call of one partition function is made; ``callable`` replaces the function.

    A :class:`~pygraph.partition.host.Host`, which documents the methods. Thread-safe.
    """

    def __init__(
        self,
        function: Function,
        info: PartitionInfo,
        options: Options,
        compilation: Compilation | None = None,
    ) -> None:
        """compilation: the compilation that it belongs to, if that can be repeated."""
        self.info = info
        self.entries: dict[bytes, Entry] = {}
        self._function = function
        self._options = options
        self._compilation = compilation
        # Protects the entries and the engine's decisions; held briefly.
        self._lock = threading.RLock()
        self._effects = ObservedEffects(info)
        self._thread = threading.local()  # `has_run`: it has run the function
        self._unpacked: dict[tuple_arguments.Lengths, Partition] = {}  # for calls with tuples
        self.callable = runtime.engine().graphed_callable(self.uncaptured, self._miss, info.device)
        if info.gradients is not None:
            runtime.engine().leave_gradients(self.callable, *info.gradients)
        if info.own is not None:
            runtime.engine().own_inputs(self.callable, *info.own)
        self._start()
        # The callable keeps this object alive through the bound method; else only a report does.
        observations.note_partition(self)
        if compilation is not None:
            compilation.add(self)
        if observations.tally is not None:
            with runtime.harmless("counting a partition"):
                observations.tally.note_partition(self)

    def _start(self) -> None:
        """Nothing is known of recordings and trials."""
        self._policy = RecordingPolicy(self._options.max_graphs)
        lanes = self._options.lanes if self._options.verify else 1  # as its graphs have (attempt.py)
        self._selector = Selector(self, self._options.select, lanes)
        self._pipeline = Pipeline(
            host=self,
            function=self._function,
            options=self._options,
            effects=self._effects,
            policy=self._policy,
            selector=self._selector,
            compilation=self._compilation,
        )

    def reset(self) -> None:
        """Drops the captured graphs; the next calls start over."""
        with self._lock:
            dropped = self.entries.copy()
            runtime.engine().clear_decisions(self.callable)
            self.entries.clear()
            self._start()
        del dropped  # the graphs' end may run other code

    def uncaptured(self, args: list[Any]) -> Sequence[Any]:
        """Runs the function itself.

        Attention with dropout keeps its random state on the CPU when it runs uncaptured and on the
        GPU while capturing; its backward reads it on the host or the device accordingly. What a
        captured forward saved must therefore move before an uncaptured backward.
        """
        if self.info.on_host and not torch.cuda.is_current_stream_capturing():
            for i in self.info.on_host:
                args[i] = args[i].cpu()
        outputs = undoing(partial(self._draw, args)) if self._effects.may_draw else self._function(args)
        self._thread.has_run = True
        return outputs

    def _draw(self, args: list[Any], undo: Undo) -> Sequence[Any]:
        runtime.begin_drawing(undo)
        return self._function(args)

    @property
    def replay(self) -> Any:
        """What the engine replays graphs by, without Python: a function of the list of inputs that
        returns outputs, or None where no graph serves the call; or its own callable."""
        return self.callable

    @property
    def has_run_here(self) -> bool:
        return getattr(self._thread, "has_run", False)

    def _miss(self, args: list[Any]) -> Sequence[Any]:
        """Called by the engine if there is no decision for the arguments, or a check is due."""
        with runtime.harmless("giving memory back"):
            allocator.give_back_if_due()
        if any(isinstance(arg, (tuple, list)) for arg in args):
            return self._call_unpacked(args)
        key = runtime.engine().signature(args, self.info.device)
        entry = self.entries.get(key)
        if torch.autograd.profiler._is_profiler_enabled:  # a recording would replace the profiler
            return self._profiled_call(entry, args)
        modes = _get_current_dispatch_mode_stack()
        if any(not isinstance(mode, _AnalyzeCustomOpInputOutputMode) for mode in modes):
            return self.uncaptured(args)
        if any(not args[i].is_cuda for i in self.info.on_host):
            return self.uncaptured(args)  # saved by a forward that is not captured yet
        if entry is None:
            return self._first_call(key, args)
        if modes:
            return self.uncaptured(args)
        return self._known_call(key, entry, args)

    def _known_call(self, key: bytes, entry: Entry, args: list[Any]) -> Sequence[Any]:
        """A later call of a signature: whose is it?"""
        graph = entry.graph  # which another thread may drop meanwhile
        if graph is not None and not unservable_calls.fits(args, graph):
            return self._unservable_call(key, entry, args)
        return self._servable_call(key, entry, args)

    def _servable_call(self, key: bytes, entry: Entry, args: list[Any]) -> Sequence[Any]:
        """What a forward has saved is laid out as by its graph, whether that served the call or not: so
        the backward's graph fits each step."""
        outputs = self._call_as_due(key, entry, args)
        pending = entry.recording.pending
        graph = entry.graph if pending is None else pending.recording.graph
        if graph is None or self.info.kind != "forward":
            return outputs
        # The only references, so that what is replaced is freed at once.
        is_tuple, outputs = isinstance(outputs, tuple), list(outputs)
        with runtime.harmless("laying out what a forward has saved"):
            graph.join_saved(outputs)
        return tuple(outputs) if is_tuple else outputs

    def _call_as_due(self, key: bytes, entry: Entry, args: list[Any]) -> Sequence[Any]:
        if audit.is_due(entry):
            return audit.call(self, entry, args)
        if entry.state is State.UNCAPTURED:
            return self._pipeline.call(key, entry, args)
        if entry.state is State.MEASURING:
            return self._selector.run_trial_call(key, entry, args)
        return self._selector.recheck(key, entry, args)

    def _profiled_call(self, entry: Entry | None, args: list[Any]) -> Sequence[Any]:
        """Runs uncaptured, unless there is a graph: profiles show its replays, and no audit."""
        if entry is None or not audit.is_due(entry) or audit.must_come_first(entry):
            return self.uncaptured(args)
        audit.postpone(entry)
        return self.callable(args)

    def _unservable_call(self, key: bytes, entry: Entry, args: list[Any]) -> Sequence[Any]:

        def body(undo: Undo) -> None:
            if not runtime.record_lock.take(undo):
                return
            graph = entry.graph
            if graph is None or self.entries.get(key) is not entry:
                return  # another thread was first
            with runtime.harmless("counting a call that does not fit"):
                if entry.donation.note_misfit(graph.replays):
                    device = self.info.device
                    self.record_anew(entry, unservable_calls.are_given_away(args, graph, device))

        undoing(body)
        return self.uncaptured(args)

    def record_anew(self, entry: Entry, may_donate: bool) -> None:
        assert entry.graph is not None
        fresh = Entry(
            donation=entry.donation.anew(may_donate, entry.graph.replays),
            recording=RecordingState(wait_seconds=math.inf),  # it has waited
        )
        runtime.engine().remove_graph(self.callable, entry.graph)
        with self._lock:
            for key, known in self.entries.copy().items():
                if known is entry:
                    self.entries[key] = fresh
        text = "%s: recorded anew, because calls did not fit its graph"
        runtime.note(logging.INFO, text, self.info.name)
        self._report_unchecked(entry)

    def _report_unchecked(self, entry: Entry) -> None:
        """Of a graph that is dropped: whether an audit had found it suspect."""
        suspects = entry.audits.suspects
        if suspects:
            text = "%s: an audit found result %d to differ, and no later call could check the graph"
            runtime.note(logging.WARNING, text, self.info.name, suspects[0])

    def _call_unpacked(self, args: list[Any]) -> Sequence[Any]:
        lengths = tuple_arguments.lengths_of(args)
        partition = self._unpacked.get(lengths)
        if partition is None:
            function = tuple_arguments.unpacked_function(self._function, lengths)
            info = tuple_arguments.unpacked_info(self.info, lengths)
            partition = Partition(function, info, self._options, self._compilation)
            partition = self._unpacked.setdefault(lengths, partition)
        return partition.callable(tuple_arguments.unpack(args))

    def _first_call(self, key: bytes, args: list[Any]) -> Sequence[Any]:
        if len(self.entries) >= _MAX_SEEN:
            self._forget_uncaptured()
        entry = Entry()
        self._selector.look_up(key, entry)
        self._pipeline.wait(key, entry, args)
        kept = entry.selection.decision  # on disk
        if kept is not None and self._effects.may_adopt(kept):
            self._effects.adopt(kept, args)
            outputs = self.uncaptured(args)
        elif self._effects.is_watching:
            outputs, failure = self._effects.watched_call(args, self.uncaptured)
            if failure:
                self.refuse(entry, failure)
        else:
            outputs = self.uncaptured(args)
        with self._lock:
            self.entries.setdefault(key, entry)  # another thread may have called first
        return outputs

    def _forget_uncaptured(self) -> None:
        with self._lock:
            for key, entry in self.entries.copy().items():
                if entry.state is State.UNCAPTURED:
                    del self.entries[key]
        runtime.engine().clear_waiting(self.callable)

    def install(self, graph: _engine.CapturedGraph, calls_per_recheck: int) -> None:
        with self._lock:
            if all(entry.graph is not graph for entry in self.entries.copy().values()):
                return  # reset meanwhile
            most = self._options.max_graphs
            dropped = runtime.engine().add_graph(self.callable, graph, most, calls_per_recheck)
            self._policy.note_dropped(len(dropped))
            makes_room = [
                (key, entry)
                for key, entry in self.entries.copy().items()
                if any(entry.graph is old for old in dropped)
            ]
            for key, entry in makes_room:
                del self.entries[key]
                self._report_unchecked(entry)

    def note_trial(self, entry: Entry) -> None:
        with self._lock:
            trials = [
                (key, other)
                for key, other in self.entries.copy().items()
                if other.state is State.MEASURING and other is not entry
            ]
            most = max(self._options.max_graphs, _LEAST_TRIALS)
            makes_room = trials[: max(0, len(trials) + 1 - most)]
            self._policy.note_dropped(len(makes_room))
            for key, other in makes_room:
                del self.entries[key]
                self._report_unchecked(other)

    def refuse(
        self,
        entry: Entry,
        reason: str,
        level: int = logging.WARNING,
        calls_until_retry: int | None = None,
    ) -> None:
        is_new = entry.state is not State.REFUSED or entry.reason != reason
        if calls_until_retry is None:
            calls_until_retry = entry.calls_until_retry
        if reason.endswith(OUT_OF_MEMORY):
            allocator.drop_blocks(self.info.device)
            calls_until_retry = self._policy.calls_until_retry()
        entry.refuse(reason, calls_until_retry)
        if is_new:
            runtime.note(level, "%s stays uncaptured: %s", self.info.name, reason)

    def is_waiting(self, key: bytes, entry: Entry) -> bool:
        """As :meth:`Pipeline.is_waiting`."""
        return self._pipeline.is_waiting(key, entry)

    @property
    def written(self) -> frozenset[int]:
        return self._effects.known.mutated

    @property
    def draws(self) -> bool:
        return self._effects.known.draws
