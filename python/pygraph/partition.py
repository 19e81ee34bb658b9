"""One partition of a compiled program: when it runs uncaptured, when it is recorded.

Per signature of the arguments (shapes, strides, dtypes, integers, alignment classes):

    call 0   uncaptured; loads kernels, tunes; sees which inputs are written and whether it draws
    call 1   recorded twice, linked, verified against the uncaptured run
    call 2+  replayed by the engine; this file is not involved

Whatever goes wrong in call 1 leaves the signature uncaptured for good, with the reason kept.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo  # before torch._functorch, which imports it in a circle
from torch._functorch._aot_autograd.runtime_wrappers import _AnalyzeCustomOpInputOutputMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pygraph import observe, recorder, runtime, verify
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


@dataclasses.dataclass(frozen=True)
class PartitionInfo:
    """What the compiler says of a partition. Hints: nothing relies on them for correctness."""

    name: str  # "forward", "backward" or "inference", with a number if there are several
    device: int
    argument_count: int  # as many as `static` and `mutated` speak of
    counts_numbers: bool  # whether argument_count includes the integers that follow the tensors
    static: frozenset[int]  # inputs that should keep their address
    mutated: frozenset[int]  # inputs that should be written
    saved: tuple[int, ...]  # outputs that only backward will see
    is_backward: bool  # only a backward is given tensors that nobody else will read
    on_host: frozenset[int]  # inputs that an uncaptured run needs on the CPU (see _uncaptured)


class State(enum.Enum):
    """What became of one signature."""

    UNCAPTURED = "uncaptured"  # seen once
    CAPTURED = "captured"
    REFUSED = "refused"  # stays uncaptured; `reason` says why


@dataclasses.dataclass
class Entry:
    """One signature of one partition."""

    state: State = State.UNCAPTURED
    reason: str = ""
    graph: Any = None  # pygraph._engine.CapturedGraph
    has_numbers: bool = False  # among the arguments
    compare_bits: bool = False  # fingerprints could not decide at the last verification
    copied_bytes: int = 0  # what Inductor's graphs would copy per call
    capture_seconds: float = 0.0
    uncaptured_seconds: float = 0.0  # host time of the uncaptured calls after the first
    executable_bytes: int = 0


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
        runtime.engine().clear_graphs(self.callable)
        self.entries.clear()
        self._recordings = 0
        self._recording_seconds = 0.0
        self._dropped = 0
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
        """Called by the engine when no graph matches the arguments."""
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
        if entry.state is not State.UNCAPTURED or modes:
            return self._uncaptured(args)
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
        has_numbers = any(isinstance(arg, int) for arg in args)
        entry = Entry(copied_bytes=self._copied_bytes(args), has_numbers=has_numbers)
        if self._watched >= _RECORDED_AT_ONCE:
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
        entry.state = State.CAPTURED
        entry.graph = recording.graph
        entry.capture_seconds = time.perf_counter() - start
        if generation == self._generation:
            self._keep(recording.graph)
        log.info(
            "%s: captured %d nodes, %d relocations, in %.0f ms",
            self.info.name,
            entry.graph.nodes,
            entry.graph.relocations,
            entry.capture_seconds * 1e3,
        )
        return outputs

    def _keep(self, graph: Any) -> None:
        dropped = runtime.engine().add_graph(self.callable, graph, self._options.max_graphs)
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
