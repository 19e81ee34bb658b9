"""A rehearsal of one call: replays of a new graph and uncaptured runs, on copies of the call's inputs.

Inputs that a run overwrites are copied. Where the device has no memory to spare for that, the originals
wait in host memory until the call is made, and each run's copies come from there. verify.py decides
what to compare.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pygraph import runtime
from pygraph.gpu import allocator, host_memory
from pygraph.gpu.clones import clone_shared_storages, sharing_storages
from pygraph.gpu.fingerprint import forget
from pygraph.record.recorder import Recording
from pygraph.runtime import log
from pygraph.select.trial import timed
from pygraph.undoing import Undo, undoing

if TYPE_CHECKING:
    from pygraph import _engine

POISON_ONES, POISON_ZEROS = 0xFF, 0x00  # bytes that fresh outputs are filled with


class VerificationError(RuntimeError):
    """A graph must not be used; the message is the reason."""


class Rehearsal:
    """The inputs of a call before it is made, and methods that run the graph or the function on copies
    of them.

    The constructor runs nothing. The call consumes ``args``, as compiled functions do.
    """

    def __init__(
        self,
        function: Callable[[list[Any]], Sequence[Any]],
        args: list[Any],
        recording: Recording,
        mutated: frozenset[int],
    ) -> None:
        self.recording = recording
        self._function = function
        self._args = args
        graphs = [g for g in (recording.graph, recording.branched) if g is not None]
        # Tensors that nothing else holds; to be found before Python objects for the storages exist
        # (gpu/clones.py).
        groups = runtime.engine().given_away(args) if recording.given_away else []
        self._may_wait = [i for group in groups for i in group.positions]
        # A result that is an argument must not be compared with itself: so each run has its own.
        own = mutated.union(recording.returned, *(graph.donated for graph in graphs))
        self._overwritten = sorted(own)
        # Positions of the written inputs, which count as results after the outputs.
        self.visible = sorted(sharing_storages(args, mutated) - recording.given_away)
        self._movable = sorted(set(self._may_wait).intersection(self._overwritten))
        self._movable_bytes = sum(args[i].nbytes for i in self._movable)
        self._waiting: list[int] = []  # in host memory: none or all that is movable
        self._device: torch.device | None = None  # that they are to come back to
        donated = sum(args[i].nbytes for i in recording.graph.donated)
        self._at_stake = recording.graph.output_bytes + donated  # bytes that a run works with
        self.host_seconds = 0.0  # of the last uncaptured run on clones, or timed replay
        self._generators = recording.generators
        self._offsets = [generator.get_offset() for generator in self._generators]
        self._is_call_begun = False
        self._kept: dict[int, Any] = {}  # inputs that the call has written, once it is made

    def _give_memory_back(self) -> None:
        """Empties the allocator's cache: runs with and without donated memory need pieces of different
        sizes."""
        forget()  # it lies in a piece of a run's memory, which could not be released otherwise
        allocator.give_back(after=self._at_stake)

    def _make_room(self) -> bool:
        """Empties the cache before a run on clones where memory is scarce. Before the call it is
        emptied in any case: what the call keeps must not lie in larger pieces of earlier runs. Returns
        whether it is scarce."""
        is_scarce = allocator.is_scarce(max(self._at_stake, self._movable_bytes))
        if is_scarce:  # before anything is moved
            self._give_memory_back()
        return is_scarce

    def timer(self, graph: _engine.CapturedGraph) -> Callable[[], float]:
        """A function that makes one replay on clones, and returns the GPU's seconds."""
        self._make_room()

        def replay() -> float:
            args = self._clones()
            self._set_offsets()
            sleep = 1.5 * self.host_seconds + 50e-6
            _, sample = timed(lambda: graph.replay(args, True), sleep)
            self.host_seconds = sample.host
            assert sample.device is not None  # because it slept
            return sample.device

        return replay

    def call(self) -> Sequence[Any]:
        """Makes the call. Returns its outputs. Consumes the inputs."""
        self.recording.graph.release_workspace()  # not to be held beside what the call allocates
        self._give_memory_back()
        if not allocator.make_room(self._at_stake):  # nor what other graphs keep, where memory is short
            runtime.release_workspaces()
            allocator.give_back_all()
        self._set_offsets()
        if self._device is not None:
            self._move(self._device)
            self._waiting = []
        self._kept = {i: self._args[i] for i in self.visible}
        return undoing(self._make_call)

    def results_of_call(self, outputs: Sequence[Any]) -> list[torch.Tensor]:
        """All results of the call, which has been made: some may be copied, for which memory may be
        short."""
        return self._results(outputs, self._kept)

    def result_count(self, outputs: Sequence[Any]) -> int:
        """How many results the call has."""
        return len(_tensors((*outputs, *self._kept.values())))

    def _make_call(self, undo: Undo) -> list[Any]:
        runtime.begin_comparing(undo)
        self._is_call_begun = True
        return list(self._function(self._args))

    def set_back(self) -> None:
        """Where an interrupt comes before the call, the generators are as they were."""
        if not self._is_call_begun:
            self._set_offsets()

    def run_uncaptured(
        self, wanted: Sequence[int], load: Callable[[float], None] = lambda seconds: None
    ) -> list[torch.Tensor]:
        """Makes an uncaptured run on clones, beside a ``load`` of the given seconds. Returns the wanted
        results."""

        def run() -> list[torch.Tensor]:
            args = self._clones()
            self._set_offsets()
            kept = {i: args[i] for i in self.visible}
            load(2 * self.host_seconds)
            start = time.perf_counter()
            outputs = self._function(args)
            self.host_seconds = time.perf_counter() - start
            results = self._results(outputs, kept)
            return [results[i] for i in wanted]

        return self._with_room(run)

    def replay(
        self,
        graph: _engine.CapturedGraph,
        poison: int,
        wanted: Sequence[int] | None = None,
        gives_away: bool = True,
        load: Callable[[], None] = lambda: None,
    ) -> list[torch.Tensor]:
        """Makes a replay on clones, beside a ``load``. Returns all results, or the wanted ones.
        ``gives_away``: whether the graph may use the memory of donated inputs. ``check_stand_ins`` must
        follow. Raises VerificationError."""

        def run() -> list[torch.Tensor]:
            args, pair = self._clones(), self.recording.pair
            self._set_offsets()
            try:
                if pair is not None:
                    pair.poison()
                load()
                outputs = list(graph.replay(args, gives_away, poison))
            except runtime.engine().DriverError as error:
                raise VerificationError(f"the graph cannot be launched: {error}") from error
            torch.cuda.current_stream().synchronize()
            if not gives_away:
                graph.release_workspace()  # it has room for what was not given away
            results = self._results(outputs, args)
            return results if wanted is None else [results[i] for i in wanted]

        return self._with_room(run)

    def check_stand_ins(self) -> None:
        """Raises VerificationError if a replay since the last check has written to memory that the
        graph was recorded with."""
        pair = self.recording.pair
        if pair is not None and not pair.untouched():
            raise VerificationError(
                "verification failed: the graph writes to memory it was recorded with"
            )

    def _clones(self) -> list[Any]:
        """The arguments of one run. Writes do not change the version counters of the call's own
        tensors: tensors that are not cloned get a counter of their own."""
        clones = clone_shared_storages(self._args, self._overwritten, self._device)
        return [
            clone.data if clone is arg and isinstance(arg, torch.Tensor) else clone
            for clone, arg in zip(clones, self._args, strict=True)
        ]

    def _with_room(self, run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Makes a run. Before, moves the inputs that the run overwrites to host memory if the device's
        memory is scarce for a copy."""
        # (Where there is enough for all, there is for a part.)
        is_scarce = self._make_room() and allocator.is_scarce(self._movable_bytes)
        if is_scarce and not self._waiting and self._park():
            self._give_memory_back()
        try:
            return run()
        except torch.OutOfMemoryError:
            if not self._park():
                raise
        return run()  # the error, which holds what the first one had, is gone

    def _park(self) -> bool:
        """Moves to host memory the inputs that are overwritten and that nothing else holds. Returns
        whether that freed memory."""
        if self._waiting or not self._movable or not host_memory.has_room(self._movable_bytes):
            return False
        self._device = self._args[self._movable[0]].device
        self._waiting = self._movable
        self._move(torch.device("cpu"))
        log.info("%d inputs wait in host memory", len(self._waiting))
        return True

    def _move(self, device: torch.device) -> None:
        """Moves waiting inputs, and the tensors that share their memory."""
        moved = clone_shared_storages(self._args, self._waiting, device)
        for i in self._may_wait:
            self._args[i] = moved[i]

    def _results(
        self, outputs: Sequence[Any], args: Sequence[Any] | dict[int, Any]
    ) -> list[torch.Tensor]:
        """All results that the program can see: the outputs, then the inputs that were written."""
        written = [args[i] for i in self.visible]
        tensors = _tensors((*outputs, *written))
        return [
            t
            if t.is_cuda and not (t.is_conj() or t.is_neg())
            else t.cuda().resolve_conj().resolve_neg()
            for t in tensors
        ]

    def _set_offsets(self) -> None:
        for generator, offset in zip(self._generators, self._offsets, strict=True):
            generator.set_offset(offset)


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]
