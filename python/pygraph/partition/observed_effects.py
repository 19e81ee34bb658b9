"""The side effects of a partition function, learned from its calls and recordings."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from pygraph import runtime, signal_exceptions
from pygraph.gpu import allocator
from pygraph.partition.call import Function, SideEffects
from pygraph.partition.signature import PartitionInfo
from pygraph.record import recorder
from pygraph.record.side_effects import Watch
from pygraph.select.trial import Decision
from pygraph.undoing import Undo, undoing

# The number of signatures whose first call is watched for side effects. The same code with other sizes
# has the same side effects, and watching costs time.
_WATCHED = 2


class ObservedEffects:
    """The side effects of one function, over all signatures. Thread-safe."""

    def __init__(self, info: PartitionInfo) -> None:
        self._info = info
        self._lock = threading.Lock()
        self._watched = 0
        self._takes_generators = False  # as arguments, in its first calls
        self.known = SideEffects()

    @property
    def is_watching(self) -> bool:
        """Whether the first call of a signature is watched for side effects."""
        return self._watched < _WATCHED

    @property
    def may_draw(self) -> bool:
        """Whether the function may draw random numbers, from any generator."""
        return self.known.draws or self._takes_generators or self.is_watching

    def may_adopt(self, kept: Decision) -> bool:
        """Whether the side effects in a decision on disk take the place of a watched call. Not where an
        operator of the program's own may have other code than when they were seen."""
        return self.is_watching and self._info.is_loaded and kept.written is not None

    def adopt(self, kept: Decision, args: list[Any]) -> None:
        written = frozenset(i for i in kept.written or () if i < len(args))
        self._note(self._hinted(args), SideEffects(written, bool(kept.draws)))

    def watched_call(self, args: list[Any], run: Function) -> tuple[Sequence[Any], str]:
        """Makes a signature's first call. Returns its outputs, and the reason if it could not be
        watched."""
        with runtime.harmless("giving memory back"):  # what the compiler's tuning has left
            allocator.give_back(after=allocator.bytes_on_gpu(args))
        hinted = self._hinted(args)

        def body(undo: Undo) -> tuple[Sequence[Any], str]:
            watch, failure = None, ""
            try:
                watch = Watch(args, self._info.device, undo)
            except Exception as error:
                signal_exceptions.pass_on(error)
                failure = recorder.describe_failure(error)
            outputs = run(args)
            if watch is None:
                return outputs, failure
            try:
                seen = SideEffects(watch.mutated(), watch.draws())
            except Exception as error:
                signal_exceptions.pass_on(error)
                return outputs, recorder.describe_failure(error)
            self._note(hinted, seen)
            return outputs, ""

        return undoing(body)

    def _hinted(self, args: list[Any]) -> frozenset[int]:
        """The inputs that the compiler says are written. Of the arguments of a first call, which it
        looks at."""
        self._takes_generators |= any(isinstance(arg, torch.Generator) for arg in args)
        return self._info.mutated if self.hints_fit(args) else frozenset()

    def _note(self, hinted: frozenset[int], seen: SideEffects) -> None:
        with self._lock:
            mutated = self.known.mutated | hinted | seen.mutated
            self.known = SideEffects(mutated, self.known.draws or seen.draws)
            self._watched += 1

    def note_written(self, positions: frozenset[int]) -> None:
        """A recording shows that the function may write these inputs."""
        with self._lock:
            self.known = SideEffects(self.known.mutated | positions, self.known.draws)

    def bytes_not_copied(self, args: Sequence[Any]) -> int:
        """What Inductor's graphs would copy per call."""
        static = self._info.static if self.hints_fit(args) else frozenset()
        return allocator.bytes_on_gpu([arg for i, arg in enumerate(args) if i not in static])

    def hints_fit(self, args: Sequence[Any]) -> bool:
        """Whether the positions in the compiler's hints fit these arguments.

        PyTorch 2.11 may drop arguments after it collected the hints, which shifts them."""
        numbers = 0 if self._info.counts_numbers else sum(isinstance(arg, int) for arg in args)
        return len(args) - numbers == self._info.argument_count
