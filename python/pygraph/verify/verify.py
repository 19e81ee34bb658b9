"""Is a new graph's replay equal to the uncaptured run? Asked before the graph is trusted.

The graph is replayed on the call's inputs, those that get overwritten as clones; then the function runs
uncaptured on the inputs themselves, the generators set back, which is the call's result. Outputs and
written inputs must be bitwise equal. Meanwhile everything an unrelocated address could reach is
poisoned: stand-in pages, fresh outputs, the workspace. A write to a stand-in page fails the
verification too. A graph that uses the memory of inputs is verified, and used, in that form only.

Where a graph's kernels can run beside each other, a second form of it is looked at in the same way; it
takes the first one's place if its results are the same, each time, and it is faster (branches.py).

That is the first look. Where much memory is at stake it compares fingerprints, 8 bytes per result, so
that two sets of results never exist at the same time. Results that differ are *suspects*: they may
come from kernels that are not deterministic (atomic additions). The next call of the signature takes a
closer look at them in the same graph, whose other results have been found equal: several replays and
uncaptured runs on clones show whether the suspects differ from themselves as much (see compare.py).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from operator import eq
from typing import Any

import torch

from pygraph.gpu import allocator
from pygraph.gpu.fingerprint import forget
from pygraph.gpu.load import disturb, keep_busy
from pygraph.record.recorder import OUT_OF_MEMORY
from pygraph.verify import branches
from pygraph.verify.compare import LARGE_BYTES, Comparison, Mismatch, fingerprints, same_bits
from pygraph.verify.rehearsal import ONES, ZEROS, Rehearsal, VerificationError, WrongReplay

log = logging.getLogger("pygraph")

_BRANCHED_RUNS = 3  # of a graph whose kernels run beside each other: a race may not show at once
# Of its chain, where results differ: beside other work, what is left to chance differs as well.
_DISTURBED_RUNS, _DISTURBED_SECONDS = 4, 0.1
_FEW_RUNS, _FURTHER_RUNS = 3, 4  # of a closer look: at first, and where these do not tell


@dataclasses.dataclass
class Verification:
    """outputs: the call's result. failure: why the graph is not to be used, or empty.

    is_wrong: whether that is because of what it does.
    suspects: results that differ, where only a closer look can tell whether the graph is right.
    """

    outputs: Sequence[Any]
    failure: str = ""
    is_wrong: bool = False
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
    allocator.free_library_workspaces()
    forget()
    result.executable_bytes = max(0, _foreign_bytes() - before)
    return result


def _foreign_bytes() -> int:
    """Device memory in use that PyTorch's allocator does not know of: executable graphs, libraries."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


class Run(Rehearsal):
    """One verification of a graph, which makes the call it was prepared for."""

    def first_look(self) -> Verification:
        """One replay, then the call itself."""
        seen: Sequence[Any] = ()
        failure, is_wrong = "", False
        in_bits = self.graph.output_bytes <= LARGE_BYTES
        try:
            replayed = self._replay(ONES)
            bits = fingerprints(replayed)
            seen = replayed if in_bits else bits
            del replayed
            branched, self._recording.branched = self._recording.branched, None
            if branched is not None:
                self._choose_form(branched, bits)
        except Exception as error:
            failure, is_wrong = _describe(error), isinstance(error, WrongReplay)
        outputs, results = self._call()
        if failure:
            return Verification(outputs, failure, is_wrong)
        try:
            expected: Sequence[Any] = results if in_bits else fingerprints(results)
            is_same = same_bits if in_bits else eq
            pairs = enumerate(zip(seen, expected, strict=True))
            return Verification(outputs, suspects=[i for i, (a, b) in pairs if not is_same(a, b)])
        except Exception as error:
            return Verification(outputs, _describe(error))

    def _choose_form(self, branched: Any, expected: Sequence[int]) -> None:
        """Lets the branched form take the chain's place, if its results are the same and it gains.

        Results that are left to chance in a chain say nothing here; they are suspects anyway.
        """
        chain = self.graph
        if not branches.is_worth_its_memory(chain, branched):
            return
        try:
            by_chance = self._differing(expected)
            self._recording.graph = branched
            changed = set[int]()
            for _ in range(_BRANCHED_RUNS):
                changed |= self._differing(expected)
            if not changed <= by_chance:
                self._recording.graph = chain
                for _ in range(_DISTURBED_RUNS):
                    by_chance |= self._differing(expected, load=lambda: disturb(_DISTURBED_SECONDS))
                self._recording.graph = branched
            if not changed <= by_chance or len(by_chance) == len(expected):
                changed -= by_chance
                raise VerificationError(
                    f"of {len(expected)} results, branches changed {len(changed)}, "
                    f"and {len(by_chance)} are left to chance"
                )
            if not branches.is_faster(self._timer(chain), self._timer(branched)):
                self._recording.graph = chain
        except Exception as error:  # the chain may be right all the same
            log.info("a graph keeps the program's order: %s", _describe(error))
            self._recording.graph = chain
        finally:
            (chain if self.graph is branched else branched).release_workspace()

    def _differing(self, expected: Sequence[int], load: Callable[[], None] = lambda: None) -> set[int]:
        """Results of one more replay that have other fingerprints."""
        found = fingerprints(self._replay(ONES, load=load))
        return {i for i, value in enumerate(expected) if found[i] != value}

    def closer_look(self, suspects: Sequence[int]) -> Verification:
        """Replays and uncaptured runs until it is clear, then the call itself. Decides."""
        failure, is_wrong = "", False
        mismatches: Sequence[Mismatch] = []
        try:
            mismatches = self._compare(suspects)
            if mismatches and self.graph.donated:
                mismatches = self._compare(suspects, gives_away=False)
        except Exception as error:
            failure, is_wrong = _describe(error), isinstance(error, WrongReplay)
        outputs, results = self._call()
        if mismatches:
            is_wrong = True
            worst = max(mismatches, key=lambda mismatch: mismatch.replay.outliers)
            wrong = len({mismatch.position for mismatch in mismatches})
            failure = (
                f"verification failed: {wrong} of {len(results)} results differ from the "
                f"uncaptured run; result {suspects[worst.position]} by {worst.replay}, another "
                f"uncaptured run by {worst.runs}"
            )
        return Verification(outputs, failure, is_wrong)

    def _compare(self, suspects: Sequence[int], gives_away: bool = True) -> list[Mismatch]:
        """gives_away: whether the two replays that show what no kernel writes use donated memory. What
        is in such memory cannot be poisoned, so they show less; but they need less memory, too."""
        comparison = Comparison(self._replay(ONES, suspects, gives_away))
        comparison.find_unwritten(self._replay(ZEROS, suspects, gives_away))
        for _ in range(_FEW_RUNS):
            comparison.add_run(self._run(suspects))
        mismatches = self._judge(comparison, suspects)
        # What changes the order of atomic additions: kernels right after each other, as in a graph,
        # and work of others on the GPU.
        for load in (keep_busy, disturb):
            if not mismatches:
                break
            for _ in range(_FURTHER_RUNS):
                comparison.add_run(self._run(suspects, load))
            load(2 * self._host_seconds)
            mismatches = self._judge(comparison, suspects)
        return mismatches

    def _judge(self, comparison: Comparison, suspects: Sequence[int]) -> list[Mismatch]:
        """What is wrong in one more replay."""
        comparison.add_replay(self._replay(ONES, suspects))
        return comparison.mismatches()


def _describe(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return f"verification {OUT_OF_MEMORY}"
    if isinstance(error, VerificationError):
        return str(error)
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"verification failed with {type(error).__name__}: {first_line}"
