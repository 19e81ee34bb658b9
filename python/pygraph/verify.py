"""Is a new graph's replay equal to the uncaptured run? Asked before the graph is trusted.

The graph is replayed on the call's inputs, those that get overwritten as clones; then the function runs
uncaptured on the inputs themselves, the generators set back, which is the call's result. Outputs and
written inputs must be bitwise equal. Meanwhile everything an unrelocated address could reach is
poisoned: stand-in pages, fresh outputs, the workspace. A write to a stand-in page fails the
verification too.

That is the first look. Where much memory is at stake it compares fingerprints, 8 bytes per result, so
that two sets of results never exist at the same time. Results that differ are *suspects*: they may
come from kernels that are not deterministic (atomic additions). The next call of the signature takes a
closer look at them in the same graph, whose other results have been found equal: several replays and
uncaptured runs on clones show whether the suspects differ from themselves as much (see compare.py).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from operator import eq
from typing import Any

import torch

from pygraph import gpu_memory, runtime
from pygraph.compare import LARGE_BYTES, Comparison, Mismatch, fingerprints, same_bits
from pygraph.fingerprint import forget
from pygraph.gpu_load import disturb, keep_busy
from pygraph.recorder import Recording

_ONES, _ZEROS = 0xFF, 0x00  # poison for fresh outputs
_FEW_RUNS, _FURTHER_RUNS = 3, 4  # of a closer look: at first, and where these do not tell


@dataclasses.dataclass
class Verification:
    """outputs: the call's result. failure: why the graph is not to be used, or empty.

    suspects: results that differ, where only a closer look can tell whether the graph is right.
    """

    outputs: Sequence[Any]
    failure: str = ""
    suspects: Sequence[int] = ()
    executable_bytes: int = 0


def verify(run: Run, suspects: Sequence[int] = ()) -> Verification:
    """Makes the call that ``run`` was prepared for, and compares replays of the graph with it.

    suspects: what an earlier verification of the same function found.
    Raises only what the uncaptured function raises.
    """
    before = _foreign_bytes()
    result = run.closer_look(suspects) if suspects else run.first_look()
    # What the comparison needed beyond a replay: workspaces of the uncaptured runs, and the graph's
    # room for arguments that are kept.
    run.graph.release_workspace()
    gpu_memory.free_library_workspaces()
    forget()
    result.executable_bytes = max(0, _foreign_bytes() - before)
    return result


def _foreign_bytes() -> int:
    """Device memory in use that PyTorch's allocator does not know of: executable graphs, libraries."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


class Run:
    """One verification: the inputs before the call, and ways to run on copies of them.

    Nothing has run when it is constructed. The call consumes ``args``, as compiled functions do.
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
        self._overwritten = sorted(mutated | frozenset(recording.graph.donated))
        self._visible = sorted(mutated - recording.given_away)
        self._host_seconds = 0.0  # of the last uncaptured run on clones
        self._generators = recording.generators
        self._offsets = [generator.get_offset() for generator in self._generators]

    def first_look(self) -> Verification:
        """One replay, then the call itself."""
        seen: Sequence[Any] = []
        failure = ""
        in_bits = self.graph.output_bytes <= LARGE_BYTES
        try:
            results = self._replay(_ONES)
            seen = results if in_bits else fingerprints(results)
            del results
        except Exception as error:
            failure = _describe(error)
        outputs, results = self._call()
        if failure:
            return Verification(outputs, failure)
        try:
            expected: Sequence[Any] = results if in_bits else fingerprints(results)
            is_same = same_bits if in_bits else eq
            pairs = enumerate(zip(seen, expected, strict=True))
            return Verification(outputs, suspects=[i for i, (a, b) in pairs if not is_same(a, b)])
        except Exception as error:
            return Verification(outputs, _describe(error))

    def closer_look(self, suspects: Sequence[int]) -> Verification:
        """Replays and uncaptured runs until it is clear, then the call itself. Decides."""
        failure = ""
        mismatches: Sequence[Mismatch] = []
        try:
            mismatches = self._compare(suspects)
        except Exception as error:
            failure = _describe(error)
        outputs, results = self._call()
        if mismatches:
            worst = max(mismatches, key=lambda mismatch: mismatch.replay.outliers)
            failure = (
                f"verification failed: {len(mismatches)} of {len(results)} results differ from the "
                f"uncaptured run; result {suspects[worst.position]} by {worst.replay}, another "
                f"uncaptured run by {worst.runs}"
            )
        return Verification(outputs, failure)

    def _compare(self, suspects: Sequence[int]) -> list[Mismatch]:
        # An output in donated memory is not poisoned, so these two leave the call's memory as it is.
        ones, zeros = (self._replay(poison, suspects, gives_away=False) for poison in (_ONES, _ZEROS))
        comparison = Comparison(ones, zeros)
        for _ in range(_FEW_RUNS):
            comparison.add_run(self._run(suspects))
        comparison.add_replay(self._replay(_ONES, suspects))
        # What changes the order of atomic additions: kernels right after each other, as in a graph,
        # and work of others on the GPU.
        for load in (keep_busy, disturb):
            if not comparison.mismatches():
                break
            for _ in range(_FURTHER_RUNS):
                comparison.add_run(self._run(suspects, load))
            load(2 * self._host_seconds)
            comparison.add_replay(self._replay(_ONES, suspects))
        return comparison.mismatches()

    def _call(self) -> tuple[Sequence[Any], list[torch.Tensor]]:
        """The call: its outputs, and all its results. After this the inputs are gone."""
        self.graph.release_workspace()  # not to be held beside what the call allocates
        self._set_offsets()
        kept = {i: self._args[i] for i in self._visible}
        outputs = list(self._function(self._args))
        return outputs, self._results(outputs, kept)

    def _run(
        self, wanted: Sequence[int], load: Callable[[float], None] = lambda seconds: None
    ) -> list[torch.Tensor]:
        """The wanted results of an uncaptured run on clones, with other work for as many seconds."""
        args = self._clones()
        self._set_offsets()
        kept = {i: args[i] for i in self._visible}
        load(2 * self._host_seconds)
        start = time.perf_counter()
        outputs = self._function(args)
        self._host_seconds = time.perf_counter() - start
        results = self._results(outputs, kept)
        return [results[i] for i in wanted]

    def _replay(
        self, poison: int, wanted: Sequence[int] | None = None, gives_away: bool = True
    ) -> list[torch.Tensor]:
        """All or the wanted results of a replay on clones, with their memory if it ``gives_away`` what
        calls do. Raises VerificationError."""
        args = self._clones()
        self._set_offsets()
        try:
            self._pair.poison()
            outputs = list(self.graph.replay(args, gives_away, poison))
        except runtime.engine().DriverError as error:
            raise VerificationError(f"the graph cannot be launched: {error}") from error
        torch.cuda.current_stream().synchronize()
        if not self._pair.untouched():
            raise VerificationError(
                "verification failed: the graph writes to memory it was recorded with"
            )
        results = self._results(outputs, args)
        return results if wanted is None else [results[i] for i in wanted]

    def _clones(self) -> list[Any]:
        return _clone_shared_storages(self._args, self._overwritten)

    def _results(
        self, outputs: Sequence[Any], args: Sequence[Any] | dict[int, Any]
    ) -> list[torch.Tensor]:
        """Everything that somebody will see: the outputs, then the inputs that were written."""
        written = [args[i] for i in self._visible]
        return [t.cuda() for t in (*outputs, *written) if isinstance(t, torch.Tensor)]

    def _set_offsets(self) -> None:
        for generator, offset in zip(self._generators, self._offsets, strict=True):
            generator.set_offset(offset)


class VerificationError(RuntimeError):
    """The reason a graph is not to be used, in words for the report."""


def _describe(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory while verifying"
    if isinstance(error, VerificationError):
        return str(error)
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"verification failed with {type(error).__name__}: {first_line}"


def _clone_shared_storages(args: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    """``args`` with the tensors at ``positions``, and all that share their memory, on clones.

    Whole storages are cloned, so that tensors which overlap still do, at the same offsets. The list
    gives the clones away, as calls do. So no Python object may ever exist for their storages: PyTorch
    keeps it, and its reference, for as long as the storage lives.
    """
    clones: dict[int, torch.Tensor] = {}  # the bytes, by address of the storage
    for i in positions:
        if isinstance(args[i], torch.Tensor):
            storage = args[i].untyped_storage()
            if storage.data_ptr() not in clones:
                clones[storage.data_ptr()] = _bytes_of(storage)
    result = list(args)
    for i, arg in enumerate(args):
        if not isinstance(arg, torch.Tensor):
            continue
        clone = clones.get(arg.untyped_storage().data_ptr())
        if clone is not None:
            tensor = torch.empty(0, dtype=arg.dtype, device=arg.device)
            layout = (arg.storage_offset(), arg.size(), arg.stride())
            result[i] = tensor.set_(clone.view(arg.dtype), *layout)  # type: ignore[call-overload]
    return result


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A copy of all bytes, as many more as numbers of any type need."""
    count = storage.nbytes()
    original = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (count,), (1,))
    copy = torch.empty(-(-count // 16) * 16, dtype=torch.uint8, device=storage.device)
    copy[:count].copy_(original)
    return copy
