"""Verification: compares a new graph's replay with the uncaptured run, before the graph is used.

The graph is replayed on the call's inputs, with clones of those that it overwrites. Then the generators
are set back, and the function runs uncaptured on the inputs themselves; that is the call. Outputs and
written inputs must have the same bits. A graph that uses the memory of inputs is verified, and used,
with that memory only.

A graph with branches has a second layout, which is checked in the same way. It replaces the chain if
its results are the same, each time, and it is faster (branches.py).

That is the quick check. Results that differ are *suspects*: they may come from kernels that are not
deterministic. The next call of the signature is a thorough check of the suspects of the same graph, by
several replays and uncaptured runs on clones (compare.py). Those that were suspects in an earlier
process are checked thoroughly in the same call already. docs/explanation/verification.md has the rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pygraph import runtime, signal_exceptions
from pygraph.gpu import allocator
from pygraph.gpu.fingerprint import forget
from pygraph.gpu.load import disturb, keep_busy, wait_for_loads
from pygraph.record.recorder import OUT_OF_MEMORY
from pygraph.runtime import log
from pygraph.select.trial import Decision
from pygraph.undoing import Undo, undoing
from pygraph.verify import branches
from pygraph.verify.bits import LARGE_BYTES, differing, summary
from pygraph.verify.compare import Comparison, Mismatch
from pygraph.verify.rehearsal import POISON_ONES, POISON_ZEROS, Rehearsal, VerificationError

if TYPE_CHECKING:
    from pygraph import _engine

# Replays of the branches, all but one beside a background load: a race may not show at once.
_BRANCHED_RUNS, _BRANCHED_SECONDS = 3, 0.01
# Replays of the chain beside a background load, if results differ: nondeterministic results differ
# then, too.
_DISTURBED_RUNS, _DISTURBED_SECONDS = 4, 0.1
_FEW_RUNS, _FURTHER_RUNS = 3, 4  # of a thorough check: at first, and where these do not tell


@dataclasses.dataclass
class Verification:
    """The result of a verification.

    outputs: the call's results. failure: why the graph must not be used, or empty.
    is_transient: whether it failed because the graph could not be replayed in this call: on its stream,
        or because its arguments are not given away there.
    suspects: positions of results that differ, so that only a thorough check can decide.
    executable_bytes: device memory of the executable graph, as far as it could be measured.
    """

    outputs: Sequence[Any]
    failure: str = ""
    is_transient: bool = False
    suspects: Sequence[int] = ()
    executable_bytes: int = 0


def verify(
    rehearsal: Rehearsal, suspects: Sequence[int] = (), kept: Decision | None = None
) -> Verification:
    """Makes the call that ``rehearsal`` was prepared for, and compares replays of its graph with it.

    If the recording has two layouts, its ``graph`` is the selected one afterwards.
    suspects: those of an earlier verification of the same graph.
    kept: the decision of an earlier process.
    Raises only the exceptions of the uncaptured function.
    """
    before = _foreign_bytes()

    def check(undo: Undo) -> Verification:
        undo.append(rehearsal.set_back)
        return thorough_check(rehearsal, suspects) if suspects else quick_check(rehearsal, kept)

    result = undoing(check)
    # What the comparison needed beyond a replay: workspaces of the uncaptured runs, and the graph's
    # room for arguments that are kept.
    rehearsal.recording.graph.release_workspace()
    allocator.free_library_workspaces()
    forget()
    result.executable_bytes = max(0, _foreign_bytes() - before)
    return result


def _foreign_bytes() -> int:
    """Device memory in use outside PyTorch's allocator: executable graphs, libraries."""
    free, total = torch.cuda.mem_get_info()
    return total - free - allocator.reserved_bytes()


def quick_check(rehearsal: Rehearsal, kept: Decision | None = None) -> Verification:
    """Makes one replay, then the call itself, and compares them.

    kept: the decision of an earlier process. Its suspects are checked thoroughly, too, before the call:
    they are likely to differ. Its layout needs no timing.
    """
    recording = rehearsal.recording
    seen = _Seen((), in_bits=True)
    failed: Verification | None = None
    known: Sequence[int] = kept.suspects if kept is not None else ()
    mismatches: Sequence[Mismatch] = ()
    try:
        seen = _replay_once(rehearsal)
        if recording.branched is not None:
            is_faster = kept is not None and kept.branches is True
            recording.use(
                _choose_layout(rehearsal, recording.graph, recording.branched, seen, is_faster)
            )
        known = [i for i in known if i < len(seen.results)]
        if known:
            mismatches = _mismatches(rehearsal, known)
    except Exception as error:
        signal_exceptions.pass_on(error)
        failed = _failed(error)
    outputs = rehearsal.call()
    if failed is not None:
        return dataclasses.replace(failed, outputs=outputs)
    if mismatches:
        return Verification(outputs, _describe_mismatches(mismatches, known, len(seen.results)))
    try:
        results = rehearsal.results_of_call(outputs)
        suspects = [i for i in seen.differing(results) if i not in known]
        return Verification(outputs, suspects=suspects)
    except Exception as error:
        signal_exceptions.pass_on(error)
        return dataclasses.replace(_failed(error), outputs=outputs)


@dataclasses.dataclass(frozen=True)
class _Seen:
    """What is kept of a replay's results: themselves (``in_bits``), or their fingerprints."""

    results: Sequence[Any]
    in_bits: bool

    def differing(self, results: Sequence[torch.Tensor]) -> list[int]:
        """Positions of results of another run that differ."""
        return differing(self.results, results, self.in_bits)


def _replay_once(rehearsal: Rehearsal) -> _Seen:
    """A function of its own so that nothing keeps the results where they do not fit beside
    fingerprints."""
    graph = rehearsal.recording.graph
    replayed = rehearsal.replay(graph, POISON_ONES)
    rehearsal.check_stand_ins()
    # (Inputs that are written count as results, and are no outputs.)
    in_bits = max(graph.output_bytes, sum(t.nbytes for t in replayed)) <= LARGE_BYTES
    return _Seen(summary(replayed, in_bits), in_bits)


def _choose_layout(
    rehearsal: Rehearsal,
    chain: _engine.CapturedGraph,
    branched: _engine.CapturedGraph,
    seen: _Seen,
    is_faster: bool,
) -> _engine.CapturedGraph:
    """Returns the layout to use: branches if their results are the chain's, and they are faster.

    seen: a replay of the chain. is_faster: whether an earlier process has found them to be faster.
    """
    if not branches.is_worth_its_memory(chain, branched):
        return chain
    chosen = chain
    try:
        _check_branches(rehearsal, chain, branched, seen)
        if is_faster or branches.is_faster(rehearsal.timer(chain), rehearsal.timer(branched)):
            chosen = branched
    except Exception as error:  # the chain may be right all the same
        signal_exceptions.pass_on(error)
        log.info("a graph keeps the program's order: %s", _describe(error))
    finally:
        (chain if chosen is branched else branched).release_workspace()
    return chosen


def _check_branches(
    rehearsal: Rehearsal,
    chain: _engine.CapturedGraph,
    branched: _engine.CapturedGraph,
    seen: _Seen,
) -> None:
    """Raises VerificationError if branches change results that are deterministic in the chain.

    Nondeterministic results are no evidence here; they are suspects anyway.
    """

    def changes(graph: _engine.CapturedGraph, load: Callable[[], None] = lambda: None) -> set[int]:
        """Positions of results that differ in one more replay."""
        return set(seen.differing(rehearsal.replay(graph, POISON_ONES, load=load)))

    changed = set[int]()
    try:
        by_chance = changes(chain)
        changed |= changes(branched)
        for _ in range(_BRANCHED_RUNS - 1):
            changed |= changes(branched, load=lambda: disturb(_BRANCHED_SECONDS))
        if not changed <= by_chance:
            for _ in range(_DISTURBED_RUNS):
                by_chance |= changes(chain, load=lambda: disturb(_DISTURBED_SECONDS))
    finally:  # what branches write is not the chain's mistake: later checks must not find it
        rehearsal.check_stand_ins()
    wait_for_loads()  # both are timed next
    if not changed <= by_chance or len(by_chance) == len(seen.results):
        changed -= by_chance
        raise VerificationError(
            f"of {len(seen.results)} results, branches changed {len(changed)}, "
            f"and {len(by_chance)} are left to chance"
        )


def thorough_check(rehearsal: Rehearsal, suspects: Sequence[int]) -> Verification:
    """Makes replays and uncaptured runs until the suspects can be judged, then the call."""
    failed: Verification | None = None
    mismatches: Sequence[Mismatch] = []
    try:
        mismatches = _mismatches(rehearsal, suspects)
    except Exception as error:
        signal_exceptions.pass_on(error)
        failed = _failed(error)
    outputs = rehearsal.call()
    if failed is not None:
        return dataclasses.replace(failed, outputs=outputs)
    if not mismatches:
        return Verification(outputs)
    count = rehearsal.result_count(outputs)
    return Verification(outputs, _describe_mismatches(mismatches, suspects, count))


def _describe_mismatches(mismatches: Sequence[Mismatch], suspects: Sequence[int], results: int) -> str:
    """The reason for which a graph is refused. results: how many there are."""
    worst = max(mismatches, key=lambda mismatch: mismatch.replay.outliers)
    wrong = len({mismatch.position for mismatch in mismatches})
    return (
        f"verification failed: {wrong} of {results} results differ from the "
        f"uncaptured run; result {suspects[worst.position]} by {worst.replay}, another "
        f"uncaptured run by {worst.runs}"
    )


def _mismatches(rehearsal: Rehearsal, suspects: Sequence[int]) -> Sequence[Mismatch]:
    """The suspects that are wrong."""
    mismatches = _compare(rehearsal, suspects)
    if mismatches and rehearsal.recording.graph.donated:
        mismatches = _compare(rehearsal, suspects, gives_away=False)
    rehearsal.check_stand_ins()
    return mismatches


def _compare(rehearsal: Rehearsal, suspects: Sequence[int], gives_away: bool = True) -> list[Mismatch]:
    """gives_away: whether the two replays that find unwritten elements use donated memory. Results in
    such memory cannot be poisoned, so fewer elements are found; but less memory is needed."""
    graph = rehearsal.recording.graph
    comparison = Comparison(rehearsal.replay(graph, POISON_ONES, suspects, gives_away))
    comparison.find_unwritten(rehearsal.replay(graph, POISON_ZEROS, suspects, gives_away))
    for _ in range(_FEW_RUNS):
        comparison.add_run(rehearsal.run_uncaptured(suspects))
    mismatches = _judge(rehearsal, comparison, suspects)
    # Loads that change the order of atomic additions: kernels without gaps, as in a graph, and a
    # background load.
    for load in (keep_busy, disturb):
        if not mismatches:
            break
        for _ in range(_FURTHER_RUNS):
            comparison.add_run(rehearsal.run_uncaptured(suspects, load))
        load(2 * rehearsal.host_seconds)
        mismatches = _judge(rehearsal, comparison, suspects)
    return mismatches


def _judge(rehearsal: Rehearsal, comparison: Comparison, suspects: Sequence[int]) -> list[Mismatch]:
    """The results that are wrong in one more replay."""
    comparison.add_replay(rehearsal.replay(rehearsal.recording.graph, POISON_ONES, suspects))
    return comparison.mismatches()


def _failed(error: Exception) -> Verification:
    """Without the call's results. Does not keep the error, whose frames hold memory."""
    if isinstance(error, torch.OutOfMemoryError):
        runtime.release_workspaces()  # for the call
    engine = runtime.engine()
    is_transient = isinstance(error, (engine.StreamNotReady, engine.NotGivenAway))
    return Verification((), _describe(error), is_transient)


def _describe(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return f"verification {OUT_OF_MEMORY}"
    if isinstance(error, VerificationError):
        return str(error)
    return f"verification failed with {type(error).__name__}: {runtime.first_line(error)}"
