"""Is a new graph's replay equal to the uncaptured run? Asked before the graph is trusted.

The function runs uncaptured on the user's tensors, which is the call's result; the graph is replayed
on the same inputs, those that get overwritten as clones, with the generators set back. Outputs and
written inputs must be bitwise equal. Meanwhile everything an unrelocated address could reach is
poisoned: stand-in pages, fresh outputs, the workspace. A write to a stand-in page fails the
verification too.

Two ways, the second where much memory is at stake:

    bits          keep both runs' results; look closer where they differ
    fingerprints  keep 8 bytes per result, so that two sets of results never exist at the same time

Kernels that are not deterministic (atomic additions) differ from themselves. Where bits differ, the
function runs uncaptured twice more, and the replay must lie within the spread of those runs. By
fingerprint that cannot be told: the verification is undecided, and the next call compares bits.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from pygraph import runtime
from pygraph.compare import (
    LARGE_BYTES,
    fingerprints,
    is_within_spread,
    same_bits,
    unwritten,
)
from pygraph.fingerprint import fingerprint, forget
from pygraph.recorder import Recording

log = logging.getLogger("pygraph")

_ONES, _ZEROS = 0xFF, 0x00  # poison for fresh outputs


@dataclasses.dataclass
class Verification:
    """outputs: the call's result. failure: why the graph is not to be used, or empty.

    undecided: the graph may be right, but only a comparison of bits can tell.
    """

    outputs: Sequence[Any]
    failure: str = ""
    undecided: bool = False
    executable_bytes: int = 0


class SideEffects:
    """Watches one uncaptured call: which inputs does it write, and does it draw random numbers?

    The compiler knows most of it, but not all (buffers it may overwrite because nobody needs them
    any more), so the contents are compared before and after, by fingerprint.
    """

    def __init__(self, args: Sequence[Any], device: int) -> None:
        self.args = list(args)
        self._generator = torch.cuda.default_generators[device]
        self._offset = self._generator.get_offset()
        self._before = self._fingerprints()

    def mutated(self) -> frozenset[int]:
        """Positions of the inputs that were written. Waits for the device."""
        after = self._fingerprints()
        if not after:
            return frozenset()
        positions = list(after)
        changed = torch.stack([after[i] != self._before[i] for i in positions]).tolist()
        forget()
        return frozenset(i for i, is_changed in zip(positions, changed, strict=True) if is_changed)

    def draws(self) -> bool:
        """Whether the default generator was used. Another thread's use gives a harmless yes."""
        return bool(self._generator.get_offset() != self._offset)

    def _fingerprints(self) -> dict[int, torch.Tensor]:
        return {
            i: fingerprint(arg)
            for i, arg in enumerate(self.args)
            if isinstance(arg, torch.Tensor) and arg.is_cuda
        }


def verify(run: Run, *, compare_bits: bool = False) -> Verification:
    """Makes the call that ``run`` was prepared for, and compares a replay of the graph with it.

    Raises only what the uncaptured function raises.
    """
    before = _foreign_bytes()
    if compare_bits or not run.is_large:
        result = run.compare_bits()
    elif run.overwrites:
        result = run.compare_fingerprints_replay_first()
    else:
        result = run.compare_fingerprints()
    # What the comparison needed beyond a replay: workspaces of the uncaptured runs, and the graph's
    # room for arguments that are kept.
    run.graph.release_workspace()
    torch._C._cuda_clearCublasWorkspaces()
    forget()
    result.executable_bytes = max(0, _foreign_bytes() - before)
    return result


def _foreign_bytes() -> int:
    """Device memory in use that PyTorch's allocator does not know of: executable graphs, libraries."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


class Run:
    """One verification: the inputs before the call, and ways to run on them again.

    Nothing has run when it is constructed; inputs that will be overwritten are cloned, so that may
    raise torch.OutOfMemoryError. The call consumes ``args``, as compiled functions do.
    """

    def __init__(
        self,
        function: Callable[[list[Any]], Sequence[Any]],
        args: list[Any],
        recording: Recording,
        mutated: frozenset[int],
    ) -> None:
        self.graph = recording.graph
        self._function = function
        self._args = args
        self._pair = recording.pair
        donated = frozenset(recording.graph.donated)  # a replay overwrites these too; nobody sees it
        self._overwritten = sorted(mutated | donated)
        self._visible = sorted(mutated - donated)
        self.overwrites = bool(self._overwritten)
        cloned = sum(args[i].nbytes for i in self._overwritten)
        self.is_large = recording.graph.output_bytes + cloned > LARGE_BYTES
        self._generators = recording.generators
        self._offsets = [generator.get_offset() for generator in self._generators]
        self._pristine = _clone_shared_storages(args, self._overwritten)

    def compare_bits(self) -> Verification:
        """Keeps the outputs of both runs and compares them."""
        kept = {i: self._args[i] for i in self._visible}
        outputs = list(self._function(self._args))
        offsets = self._current_offsets()
        try:
            failure = self._compare_with_replay(outputs, kept)
        except Exception as error:  # the call has its result; nothing here may take it away
            failure = _describe(error)
        finally:
            self._set_offsets(offsets)
        return Verification(outputs, failure)

    def compare_fingerprints(self) -> Verification:
        """For functions that overwrite nothing: can be computed again if fingerprints differ."""
        kept = list(self._args)
        outputs = list(self._function(self._args))
        offsets = self._current_offsets()
        replayed: list[Any] = []
        try:
            expected = fingerprints(outputs)
            outputs.clear()
            # The workspace is another size than what was just freed: not to be taken beside it.
            torch.cuda.empty_cache()
            replayed, failure = self._replay(list(kept), _ONES, gives_away=False)
            self._set_offsets(offsets)
            if not failure:
                found = fingerprints(replayed)
                if expected == found:
                    return Verification(replayed)
                differ = [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b]
                log.debug("fingerprints differ at results %s; comparing bits", differ)
        except Exception as error:
            failure = _describe(error)
        # Rare: once more, with both sets of outputs.
        replayed.clear()
        self._args = kept
        self._set_offsets(self._offsets)
        again = self.compare_bits()
        again.failure = failure or again.failure
        return again

    def compare_fingerprints_replay_first(self) -> Verification:
        """The replay consumes the clones, the uncaptured run the arguments themselves."""
        replay_args, self._pristine = self._pristine, []
        offsets = self._current_offsets()
        found: list[int] = []
        try:
            replayed, failure = self._replay(replay_args, _ONES, gives_away=True)
            if not failure:
                found = fingerprints(self._results(replayed, replay_args))
            replayed.clear()
        except Exception as error:
            failure = _describe(error)
        finally:
            replay_args.clear()
            self._set_offsets(offsets)
        kept = {i: self._args[i] for i in self._visible}
        outputs = list(self._function(self._args))
        if failure:
            return Verification(outputs, failure)
        try:
            expected = fingerprints([*outputs, *kept.values()])
        except Exception as error:
            return Verification(outputs, _describe(error))
        return Verification(outputs, undecided=expected != found)

    def _replay(self, args: list[Any], poison: int, *, gives_away: bool) -> tuple[list[Any], str]:
        self._set_offsets(self._offsets)
        try:
            self._pair.poison()
            self.graph.poison_workspace(torch.cuda.current_stream().cuda_stream)
            replayed = list(self.graph.replay(args, gives_away, poison))
        except runtime.engine().DriverError as error:
            return [], f"the graph cannot be launched: {error}"
        torch.cuda.current_stream().synchronize()
        if not self._pair.untouched():
            return replayed, "verification failed: the graph writes to memory it was recorded with"
        return replayed, ""

    def _compare_with_replay(self, outputs: Sequence[Any], kept: dict[int, Any]) -> str:
        replay_args = self._fresh_args()
        replay_outputs, failure = self._replay(replay_args, _ONES, gives_away=True)
        if failure:
            return failure
        expected = self._results(outputs, kept)
        replayed = self._results(replay_outputs, replay_args)
        different = {
            i: replayed[i] for i, result in enumerate(expected) if not same_bits(replayed[i], result)
        }
        del replay_outputs, replay_args, replayed  # only what differs is kept from here on
        if not different:
            return ""
        ones, zeros = (self._replay_again(poison, different) for poison in (_ONES, _ZEROS))
        samples = [self._run_again(different) for _ in range(2)]

        def is_outside(i: int) -> bool:
            unused = unwritten(ones[i], zeros[i])
            tensors = (different[i], expected[i], *(sample[i] for sample in samples))
            masked = [t.masked_fill(unused, 0) for t in tensors]
            return not is_within_spread(masked[0], masked[1], masked[2:])

        outside = [i for i in different if is_outside(i)]
        if not outside:
            return ""
        return (
            f"verification failed: {len(outside)} of {len(expected)} results differ from the "
            f"uncaptured run, first is result {outside[0]}"
        )

    def _replay_again(self, poison: int, wanted: Iterable[int]) -> dict[int, torch.Tensor]:
        args = self._fresh_args()
        replayed, failure = self._replay(args, poison, gives_away=False)
        if failure:
            raise RuntimeError(failure)
        results = self._results(replayed, args)
        return {i: results[i] for i in wanted}

    def _run_again(self, wanted: Iterable[int]) -> dict[int, torch.Tensor]:
        args = self._fresh_args()
        kept = {i: args[i] for i in self._visible}
        self._set_offsets(self._offsets)
        results = self._results(self._function(args), kept)
        return {i: results[i] for i in wanted}

    def _fresh_args(self) -> list[Any]:
        return _clone_shared_storages(self._pristine, self._overwritten)

    def _results(
        self, outputs: Sequence[Any], args: Sequence[Any] | dict[int, Any]
    ) -> list[torch.Tensor]:
        """Everything that somebody will see: the outputs, then the inputs that were written."""
        written = [args[i] for i in self._visible]
        return [t.cuda() for t in (*outputs, *written) if isinstance(t, torch.Tensor)]

    def _current_offsets(self) -> list[int]:
        return [generator.get_offset() for generator in self._generators]

    def _set_offsets(self, offsets: Iterable[int]) -> None:
        for generator, offset in zip(self._generators, offsets, strict=True):
            generator.set_offset(offset)


def _describe(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory while verifying"
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"verification failed with {type(error).__name__}: {first_line}"


def _clone_shared_storages(args: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    """``args`` with the tensors at ``positions``, and all that share their memory, on clones.

    Whole storages are cloned, so that tensors which overlap still do, at the same offsets.
    """
    clones: dict[int, torch.UntypedStorage] = {}
    for i in positions:
        if isinstance(args[i], torch.Tensor):
            storage = args[i].untyped_storage()
            if storage.data_ptr() not in clones:
                clones[storage.data_ptr()] = storage.clone()
    result = list(args)
    for i, arg in enumerate(args):
        if not isinstance(arg, torch.Tensor) or not arg.is_cuda:
            continue
        clone = clones.get(arg.untyped_storage().data_ptr())
        if clone is not None:
            result[i] = torch.empty(0, dtype=arg.dtype, device=arg.device).set_(
                clone, arg.storage_offset(), arg.size(), arg.stride()
            )
    return result
