"""One partition of a compiled program: when it runs uncaptured, when it is recorded.

Per signature of the arguments (shapes, strides, dtypes, numbers, alignment classes, and PyTorch's
switches):

    call 1   uncaptured; loads kernels, tunes; sees what inputs change and whether it draws
    call 2   recorded twice, which tells what may be written; linked, verified against an uncaptured run
    call 3+  on trial: uncaptured and replayed in turns, until one is known to be faster (selector.py)
    then     replayed by the engine, or run uncaptured; this file is not involved, but for a look at
             whether the times, and the results, still are what they were

Where shapes vary, calls first wait: the engine runs them uncaptured until they have cost as much as a
recording (recording_policy.py). Whatever goes wrong in call 2 leaves the signature uncaptured, in
most cases for good, with the reason kept.

Threads: whoever records, tries, audits or drops a graph holds runtime.record_lock; the others run
uncaptured. An entry that has a graph is changed by its holder only. A reset waits for nobody: what it
has forgotten is not told to the engine any more (``keep``).
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch._dynamo  # before torch._functorch, which imports it in a circle
from torch._functorch._aot_autograd.runtime_wrappers import _AnalyzeCustomOpInputOutputMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pygraph import observations, runtime
from pygraph.gpu import allocator
from pygraph.options import Options
from pygraph.partition import audit, capture, unservable_calls
from pygraph.partition.capture import Attempt, Function, SideEffects
from pygraph.partition.recording_policy import RecordingPolicy
from pygraph.partition.selector import Selector
from pygraph.partition.signature import Entry, PartitionInfo, State
from pygraph.partition.tuple_arguments import (
    Lengths,
    lengths_of,
    unpack,
    unpacked_function,
    unpacked_info,
)
from pygraph.record import recorder
from pygraph.record.side_effects import Watch
from pygraph.uncapturable import Compilation

# Signatures remembered after one call. Shapes that never come back must not fill the memory.
_MAX_SEEN = 4096
# Of so many signatures the first call is watched for side effects. The same code with other sizes has
# the same ones, and watching costs time.
_WATCHED = 2
# Recordings of a signature that may fail in threads that have not run the function before. Then it is
# left to one that has.
_MOST_IN_NEW_THREADS = 3
# So many calls that cannot be recorded for a reason of their own are followed by another try at once.
# Then more and more calls lie between them: all calls of a program may be such.
_TRIED_AT_ONCE = 4


class Partition:
    """Decides for one partition function; ``callable`` goes in its place. Thread-safe."""

    def __init__(
        self,
        function: Function,
        info: PartitionInfo,
        options: Options,
        compilation: Compilation | None = None,
    ) -> None:
        """compilation: what it is part of, if that can be made anew."""
        self.info = info
        self._compilation = compilation
        self.entries: dict[bytes, Entry] = {}
        self._function = function
        self._options = options
        self._policy = RecordingPolicy(options.max_graphs)
        self._selector = Selector(self, options.select)
        # Of what is known of the signatures, and of what the engine was told; held for moments only.
        self._lock = threading.RLock()
        self._watched = 0
        self._takes_generators = False  # as arguments, in its first calls
        self._thread = threading.local()  # `is_known`: it has run the function
        self._unpacked: dict[Lengths, Partition] = {}  # for calls with tuples
        self._effects = SideEffects()  # of the function, as seen in its first calls
        self.callable = runtime.engine().graphed_callable(self.uncaptured, self._miss, info.device)
        # The callable keeps this object alive through the bound method; else only a report does.
        runtime.partitions.add(self)
        if compilation is not None:
            compilation.add(self)
        observation = observations.current()
        if observation is not None:
            observation.partitions.append(self)

    def reset(self) -> None:
        """Drops the captured graphs; the next calls start over."""
        with self._lock:
            dropped, self.entries = self.entries, {}
            runtime.engine().clear_decided(self.callable)
            self._policy = RecordingPolicy(self._options.max_graphs)
            self._selector = Selector(self, self._options.select)
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
        if self._effects.draws or self._takes_generators or self._watched < _WATCHED:
            with runtime.drawing():
                outputs = self._function(args)
        else:
            outputs = self._function(args)
        self._thread.is_known = True
        return outputs

    def _miss(self, args: list[Any]) -> Sequence[Any]:
        """Called by the engine when nothing is decided for the arguments, or a look is due."""
        with runtime.harmless("giving memory back"):
            allocator.give_back_if_due()
        if any(isinstance(arg, (tuple, list)) for arg in args):
            return self._call_unpacked(args)
        key = runtime.engine().signature(args, self.info.device)
        entry = self.entries.get(key)
        if torch.autograd.profiler._is_profiler_enabled:  # recording would take the profiler's place
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
        graph = entry.graph  # which another thread may drop meanwhile
        if graph is not None and not unservable_calls.gives_away(args, graph.donated):
            return self._unservable_call(key, entry, args)
        if audit.is_due(entry):
            return audit.call(self, entry, args)
        if entry.state is State.MEASURING:
            return self._selector.run(key, entry, args)
        if entry.state is State.UNCAPTURED:
            if not entry.is_under_way and self._wait(key, entry, args):
                return self.uncaptured(args)
            return self._capture(key, entry, args)
        return self._selector.look(key, entry, args)

    def _profiled_call(self, entry: Entry | None, args: list[Any]) -> Sequence[Any]:
        """Runs uncaptured; but the profile of a graph shows its replays, not an audit."""
        if entry is None or not audit.is_due(entry) or entry.audits.suspects:
            return self.uncaptured(args)
        audit.postpone(entry)
        return self.callable(args)  # type: ignore[no-any-return]

    def _unservable_call(self, key: bytes, entry: Entry, args: list[Any]) -> Sequence[Any]:
        if runtime.record_lock.acquire(blocking=False):
            try:
                if entry.graph is not None:  # no other thread was first
                    with runtime.harmless("counting a call that does not fit"):
                        self._note_unservable(key, entry)
            finally:
                runtime.record_lock.release()
        return self.uncaptured(args)

    def _note_unservable(self, key: bytes, entry: Entry) -> None:
        if entry.state is State.CAPTURED:
            self._selector.keep(entry)  # a look that was due can wait
        renewed = unservable_calls.renewed(entry)
        if renewed is None:
            return
        with self._lock:
            if self.entries.get(key) is entry:
                self.entries[key] = renewed
        runtime.engine().remove_graph(self.callable, entry.graph)
        runtime.note(
            logging.INFO, "%s: recorded anew, because calls did not fit its graph", self.info.name
        )

    def _call_unpacked(self, args: list[Any]) -> Sequence[Any]:
        lengths = lengths_of(args)
        partition = self._unpacked.get(lengths)
        if partition is None:
            function = unpacked_function(self._function, lengths)
            info = unpacked_info(self.info, lengths)
            partition = Partition(function, info, self._options, self._compilation)
            partition = self._unpacked.setdefault(lengths, partition)
        return partition.callable(unpack(args))  # type: ignore[no-any-return]

    def _wait(self, key: bytes, entry: Entry, args: list[Any]) -> bool:
        """Leaves calls that are not worth a recording yet to the engine. False if they are."""
        # The compiler puts integers last.
        has_numbers = any(isinstance(arg, int) for arg in reversed(args))
        seconds = self._policy.seconds_to_wait(has_numbers)
        if seconds <= entry.waits_seconds:
            return False
        runtime.engine().wait(self.callable, key, seconds - entry.waits_seconds)
        entry.waits_seconds = seconds
        return True

    def is_waiting(self, key: bytes, entry: Entry) -> bool:
        """Whether the signature was called more than once and is still to be recorded, or on trial."""
        if entry.state is State.MEASURING:
            return True
        left = runtime.engine().waiting_seconds(self.callable, key)
        return entry.state is State.UNCAPTURED and left < entry.waits_seconds

    def keep(self, graph: Any, calls_per_look: int) -> None:
        """Lets the engine replay the graph; every so many calls it asks again (0: never)."""
        with self._lock:
            if all(entry.graph is not graph for entry in self.entries.copy().values()):
                return  # reset meanwhile
            most = self._options.max_graphs
            dropped = runtime.engine().add_graph(self.callable, graph, most, calls_per_look)
            self._policy.note_dropped(len(dropped))
            for key, entry in self.entries.copy().items():
                if any(entry.graph is old for old in dropped):
                    del self.entries[key]

    def refuse(self, entry: Entry, reason: str, level: int = logging.WARNING) -> None:
        """Leaves the signature uncaptured: for good, or where memory was short for many calls."""
        is_new = entry.state is not State.REFUSED or entry.reason != reason
        if reason.endswith(recorder.OUT_OF_MEMORY):
            entry.calls_until_retry = self._policy.calls_until_retry()
        entry.state, entry.reason = State.REFUSED, reason
        entry.graph = entry.trial = entry.decision = entry.pending = None
        entry.looks = 0  # the engine is to be told
        if is_new:
            runtime.note(level, "%s stays uncaptured: %s", self.info.name, reason)

    def _first_call(self, key: bytes, args: list[Any]) -> Sequence[Any]:
        if len(self.entries) >= _MAX_SEEN:
            self._forget_uncaptured()
        entry = Entry()
        self._wait(key, entry, args)
        if self._watched >= _WATCHED:
            outputs = self.uncaptured(args)
        else:
            outputs = self._watched_call(entry, args)
        with self._lock:
            self.entries.setdefault(key, entry)  # another thread may have called first
        return outputs

    def _watched_call(self, entry: Entry, args: list[Any]) -> Sequence[Any]:
        with runtime.harmless("giving memory back"):  # what the compiler's tuning has left
            allocator.give_back(after=allocator.bytes_on_gpu(args))
        hinted = self.info.mutated if self._hints_fit(args) else frozenset()
        self._takes_generators |= any(isinstance(arg, torch.Generator) for arg in args)
        watch = None
        try:
            watch = Watch(args, self.info.device)
        except Exception as error:
            self.refuse(entry, recorder.describe_failure(error))
        outputs = self.uncaptured(args)
        if watch is None:
            return outputs
        try:
            mutated, draws = watch.mutated(), watch.draws()
        except Exception as error:
            self.refuse(entry, recorder.describe_failure(error))
            return outputs
        with self._lock:
            self._effects = SideEffects(
                mutated=self._effects.mutated | hinted | mutated, draws=self._effects.draws or draws
            )
            self._watched += 1
        return outputs

    def _capture(self, key: bytes, entry: Entry, args: list[Any]) -> Sequence[Any]:
        """A call that is worth a recording, unless it is known already that a graph is not wanted."""
        is_known = getattr(self._thread, "is_known", False)
        if not is_known and entry.raised_in_new_threads >= _MOST_IN_NEW_THREADS:
            return self.uncaptured(args)
        if entry.calls_to_skip > 0:
            entry.calls_to_skip -= 1
            return self.uncaptured(args)
        if not runtime.record_lock.acquire(blocking=False):
            return self.uncaptured(args)  # another thread records; next time
        try:
            if self.entries.get(key) is not entry or entry.state is not State.UNCAPTURED:
                return self.uncaptured(args)  # another thread was first
            self._selector.recall(key, entry)
            if entry.state is State.UNCAPTURED:
                return self._record(key, entry, args, is_known)
        finally:
            runtime.record_lock.release()
        return self._selector.look(key, entry, args)

    def _record(self, key: bytes, entry: Entry, args: list[Any], is_known: bool) -> Sequence[Any]:
        at_stake = 0
        with runtime.harmless("giving memory back"):
            entry.copied_bytes = self._copied_bytes(args)
            at_stake = allocator.bytes_on_gpu(args)
            allocator.give_back(after=at_stake)
        start = time.perf_counter()
        try:
            with torch.cuda.device(self.info.device):
                if not is_known and entry.raised_in_new_threads > 0:
                    recorder.make_handles()
                result = capture.attempt(
                    *(self._function, self.uncaptured, args, self.info, self._options),
                    self._effects,
                    entry.takes_memory,
                    entry.pending,
                )
        finally:
            seconds = time.perf_counter() - start
            self._policy.note_recording(seconds)
        args.clear()
        with self._lock:
            self._effects = dataclasses.replace(
                self._effects, mutated=self._effects.mutated | result.written
            )
        # What verification has left. A graph that is used already does not ask at its next call, so
        # part of it goes at once; but not where an inference's result is alive (docs/design.md).
        with runtime.harmless("giving memory back"):
            allocator.give_back_at_next_call(after=at_stake)
            if self.info.kind != "inference":
                allocator.give_back(after=at_stake)
        if self.entries.get(key) is entry:  # not reset meanwhile
            if result.is_transient or (result.raised and not is_known):
                self._try_again(entry, result)
                return result.outputs
            with runtime.harmless("keeping a graph"):
                self._conclude(entry, result, seconds)
        return result.outputs

    def _try_again(self, entry: Entry, result: Attempt) -> None:
        """The capture failed for a reason that may lie in the call: a library without a handle for the
        thread, or a pool that the call's memory comes from. A later one tries again."""
        if result.is_transient:
            entry.not_now += 1
            if entry.not_now > _TRIED_AT_ONCE:
                entry.calls_to_skip = 1 << min(entry.not_now, 16)
        else:
            entry.raised_in_new_threads += 1
        runtime.note(logging.INFO, "%s: not recorded in this call: %s", self.info.name, result.failure)

    def _conclude(self, entry: Entry, result: Attempt, seconds: float) -> None:
        entry.pending = result.pending
        if result.failure:
            self.refuse(entry, result.failure + self._note_uncapturable(result))
        if result.graph is None:
            return
        graph = entry.graph = result.graph
        entry.state = State.CAPTURED
        entry.executable_bytes = result.executable_bytes
        entry.returned = result.returned
        entry.capture_seconds = seconds
        audit.start(entry, self._options.audit)
        runtime.note(
            logging.INFO,
            "%s: captured %d nodes, %d relocations, in %.0f ms",
            *(self.info.name, graph.nodes, graph.relocations, seconds * 1e3),
        )
        self._selector.captured(entry)

    def _note_uncapturable(self, result: Attempt) -> str:
        """What follows from the failure, in words; nothing in most cases."""
        with runtime.harmless("noting what cannot be captured"):
            if self._compilation is not None and self._compilation.note_uncapturable(
                result.operator, result.failure
            ):
                return f"; compiled anew, without {result.operator} in graphs"
        return ""

    def _forget_uncaptured(self) -> None:
        with self._lock:
            for key, entry in self.entries.copy().items():
                if entry.state is State.UNCAPTURED:
                    del self.entries[key]
        runtime.engine().clear_waiting(self.callable)

    @property
    def written(self) -> frozenset[int]:
        """Positions of inputs that the function may write, in any signature that was recorded."""
        return self._effects.mutated

    def moving(self, args: Sequence[Any]) -> list[int]:
        """Positions of tensors that may be elsewhere at the next call, or that the function writes."""
        static = self.info.static if self._hints_fit(args) else frozenset()
        positions = (i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor))
        return [i for i in positions if i in self.written or i not in static]

    def _hints_fit(self, args: Sequence[Any]) -> bool:
        # PyTorch 2.11 may drop arguments after it made its maps, which shifts every hint.
        numbers = 0 if self.info.counts_numbers else sum(isinstance(arg, int) for arg in args)
        return len(args) - numbers == self.info.argument_count

    def _copied_bytes(self, args: Sequence[Any]) -> int:
        static = self.info.static if self._hints_fit(args) else frozenset()
        return allocator.bytes_on_gpu([arg for i, arg in enumerate(args) if i not in static])
