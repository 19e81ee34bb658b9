"""Is a new graph's replay equal to the uncaptured run? Asked before the graph is trusted.

The function runs uncaptured on the user's tensors, which is the call's result; the graph is replayed
on the same inputs, those that get written as clones, with the generators set back. Outputs and written
inputs must be bitwise equal. Meanwhile everything an unrelocated address could reach is poisoned:
stand-in pages, fresh outputs, the workspace. A write to a stand-in page fails the verification too.

Kernels that are not deterministic (atomic additions) differ from themselves. Where bits differ, the
function runs uncaptured twice more, and the replay must lie within the spread of those runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from pygraph import runtime
from pygraph.fingerprint import as_integers, fingerprint
from pygraph.recorder import Recording

# Outputs beyond this are compared by fingerprint, so that two sets never exist at the same time.
_LARGE_BYTES = 1 << 26
# How far outside the spread of uncaptured runs a replay may lie, as they are only three samples.
_SPREAD_FACTOR = 2.0
# Two uncaptured runs that differ by more than this share of a value do not compute that value.
_ROUGHLY = 0.05
_OUT_OF_MEMORY = "out of memory while verifying"


@dataclasses.dataclass
class Verification:
    """outputs: the call's result. failure: why the graph is not to be used, or empty."""

    outputs: Sequence[Any]
    failure: str
    executable_bytes: int


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


def verify(run: Run) -> Verification:
    """Makes the call that ``run`` was prepared for, and compares a replay of the graph with it.

    Raises only what the uncaptured function raises.
    """
    before = _foreign_bytes()
    if run.may_free_outputs and run.graph.output_bytes > _LARGE_BYTES:
        outputs, failure = run.compare_by_fingerprint()
    else:
        outputs, failure = run.compare_bits()
    # Workspaces of the uncaptured runs: the graph has its own, and they come back when needed.
    torch._C._cuda_clearCublasWorkspaces()
    return Verification(outputs, failure, max(0, _foreign_bytes() - before))


def _foreign_bytes() -> int:
    """Device memory in use that PyTorch's allocator does not know of: executable graphs, libraries."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


class Run:
    """One verification: the inputs before the call, and ways to run on them again.

    Nothing has run when it is constructed; inputs that will be written are cloned, so that may raise
    torch.OutOfMemoryError.
    """

    def __init__(
        self,
        function: Callable[[list[Any]], Sequence[Any]],
        args: list[Any],
        recording: Recording,
        mutated: frozenset[int],
    ) -> None:
        self.function = function
        self.args = args
        self.graph = recording.graph
        self._pair = recording.pair
        self._mutated = sorted(mutated)
        self.may_free_outputs = not mutated  # because they can be computed again
        self._generators = recording.generators
        self._offsets = [generator.get_offset() for generator in self._generators]
        self._pristine = _clone_shared_storages(args, self._mutated)

    def compare_bits(self) -> tuple[Sequence[Any], str]:
        """Keeps the outputs of both runs and compares them."""
        outputs = list(self.function(list(self.args)))
        offsets = self._current_offsets()
        try:
            replay_args = _clone_shared_storages(self._pristine, self._mutated)
            replayed, failure = self._replay(replay_args)
            if not failure:
                results = self._results(outputs, self.args)
                failure = self._compare(results, self._results(replayed, replay_args))
        except torch.OutOfMemoryError:
            failure = _OUT_OF_MEMORY
        finally:
            self._set_offsets(offsets)
        return outputs, failure

    def compare_by_fingerprint(self) -> tuple[Sequence[Any], str]:
        """Frees the outputs of the uncaptured run before the replay; needs no mutated input."""
        outputs = list(self.function(list(self.args)))
        offsets = self._current_offsets()
        expected = _fingerprints_of(outputs)
        outputs.clear()
        # The workspace is another size than what was just freed, and must not be taken beside it.
        torch.cuda.empty_cache()
        replayed, failure = self._replay(list(self.args))
        self._set_offsets(offsets)
        if not failure and _equal(expected, _fingerprints_of(replayed)):
            return replayed, ""
        # Rare: once more, with both sets of outputs.
        del replayed
        self._set_offsets(self._offsets)
        again, slow_failure = self.compare_bits()
        return again, failure or slow_failure

    def _replay(self, replay_args: list[Any]) -> tuple[list[Any], str]:
        self._set_offsets(self._offsets)
        try:
            self._pair.poison()
            self.graph.poison_workspace(torch.cuda.current_stream().cuda_stream)
            replayed = list(self.graph.replay(replay_args, True))
        except runtime.engine().DriverError as error:
            return [], f"the graph cannot be launched: {error}"
        except torch.OutOfMemoryError:
            return [], _OUT_OF_MEMORY
        torch.cuda.current_stream().synchronize()
        if not self._pair.untouched():
            return replayed, "verification failed: the graph writes to memory it was recorded with"
        return replayed, ""

    def _compare(self, expected: list[torch.Tensor], replayed: list[torch.Tensor]) -> str:
        different = [
            i for i, (a, b) in enumerate(zip(expected, replayed, strict=True)) if not same_bits(a, b)
        ]
        if not different:
            return ""
        samples = [self._run_again() for _ in range(2)]
        outside = [
            i
            for i in different
            if not _is_within_spread(replayed[i], expected[i], [sample[i] for sample in samples])
        ]
        if not outside:
            return ""
        return (
            f"verification failed: {len(outside)} of {len(expected)} results differ from the "
            f"uncaptured run, first is result {outside[0]}"
        )

    def _run_again(self) -> list[torch.Tensor]:
        args = _clone_shared_storages(self._pristine, self._mutated)
        self._set_offsets(self._offsets)
        return self._results(self.function(list(args)), args)

    def _results(self, outputs: Sequence[Any], args: Sequence[Any]) -> list[torch.Tensor]:
        written = [args[i] for i in self._mutated]
        return [t.cuda() for t in (*outputs, *written) if isinstance(t, torch.Tensor)]

    def _current_offsets(self) -> list[int]:
        return [generator.get_offset() for generator in self._generators]

    def _set_offsets(self, offsets: Iterable[int]) -> None:
        for generator, offset in zip(self._generators, offsets, strict=True):
            generator.set_offset(offset)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits. Waits for the device."""
    if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        return False
    if a.nbytes > _LARGE_BYTES:
        return bool(fingerprint(a) == fingerprint(b))
    return torch.equal(as_integers(a), as_integers(b))


def _fingerprints_of(outputs: Iterable[Any]) -> list[torch.Tensor]:
    return [fingerprint(t) for t in outputs if isinstance(t, torch.Tensor)]


def _equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(bool(x == y) for x, y in zip(a, b, strict=True))


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


def _is_within_spread(
    replayed: torch.Tensor, expected: torch.Tensor, samples: Sequence[torch.Tensor]
) -> bool:
    """Whether the replay is as close to one uncaptured run as further uncaptured runs are.

    Elements that uncaptured runs do not agree on even roughly are memory that nobody writes (padding
    of an output); they say nothing and are left out.
    """
    if all(same_bits(sample, expected) for sample in samples):
        return False  # the uncaptured runs agree with each other
    wide = _as_doubles(expected)
    deviations = [_as_doubles(sample) - wide for sample in samples]
    roughly = _ROUGHLY * (wide.abs() + wide.abs().nanmedian())
    meaningful = torch.stack([d.abs() <= roughly for d in deviations]).all(0)
    spread = max(float(torch.where(meaningful, d, 0).norm()) for d in deviations)
    error = float(torch.where(meaningful, _as_doubles(replayed) - wide, 0).norm())
    return error <= _SPREAD_FACTOR * spread  # false for NaN


def _as_doubles(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
