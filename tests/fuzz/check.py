"""Runs a program twice, graphed and not, and says what came of it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from . import compiled_level, partition_level
from .calls import FLIPS
from .observe import Difference, Seen, differences, message_of
from .program import UNCAPTURED, Program
from .rounding import moved_by_rounding
from .series import FatalError, Run, series, synchronize

# How far apart results of one computation may be, of their norm, where the order of additions is left
# to chance or compilers fuse in other ways; and how many times as far as two uncaptured runs are.
_ROUNDING = 2.0**-6
_SPREAD = 4.0
_RUNS = 3
_COMPILER_ERRORS = ("InductorError", "BackendCompilerFailed")  # plain Inductor cannot compile a program
_CONCURRENT_RUNS = 10  # where PyTorch compiles in several threads, calls raise by chance


@dataclasses.dataclass
class Outcome:
    """verdict: "equal", "wrong", "by chance" (different, as uncaptured runs are), "unjudged" (left to
    chance, and no distance is defined), "raises" (every call raised, in both, or plain Inductor cannot
    compile the program). detail: of the first differences. reasons: why graphs were refused. evidence:
    if it is wrong, what PyGraph logged, call by call, and its graphs."""

    seed: int
    level: str
    verdict: str
    detail: list[str] = dataclasses.field(default_factory=list)
    calls: int = 0
    raised: int = 0
    replays: int = 0
    states: dict[str, int] = dataclasses.field(default_factory=dict)
    reasons: dict[str, int] = dataclasses.field(default_factory=dict)
    leaked: int = 0
    evidence: list[str] = dataclasses.field(default_factory=list)


def _ignore(name: str) -> None: ...


def check(
    program: Program,
    device: str,
    wrap: partition_level.Wrap | None = None,
    on_series: Callable[[str], None] = _ignore,
) -> Outcome:
    """wrap: what makes the graphed form of a partition function; PyGraph unless given.
    on_series: is told the name of each series of calls before it begins.

    Raises FatalError where the process is lost.
    """
    outcome = Outcome(program.seed, program.level, "equal")
    try:
        with _memory_back(program, device, outcome):
            _check(program, device, wrap or partition_level.graphed, outcome, on_series)
    finally:
        _forget_graphs()
    return outcome


def run_uncaptured(program: Program, device: str) -> list[Seen]:
    """The series of calls without PyGraph."""
    if program.level == "compiled":
        found = series(program, device, _compiled(program, device, "inductor"))
    else:
        run = partition_level.make(program, device, partition_level.direct)
        found = series(program, device, run)
    synchronize(device)
    return found


def _check(
    program: Program,
    device: str,
    wrap: partition_level.Wrap,
    outcome: Outcome,
    on_series: Callable[[str], None],
) -> None:
    on_series(UNCAPTURED)
    wanted = run_uncaptured(program, device)
    on_series("graphed")
    outcome.calls = len(wanted)
    outcome.raised = sum(bool(seen.error) for seen in wanted)
    if program.level == "compiled":
        run = _compiled(program, device, "pygraph")
    else:
        run = partition_level.make(program, device, wrap)
    with _early_recording(program, device), _logged() as lines:
        with _told(lines):
            seen = series(program, device, run)
            synchronize(device)
        graphs = _graphs()
        _count(outcome)
    if any(call.error in _COMPILER_ERRORS for call in wanted):
        outcome.verdict = "raises"
        outcome.detail = sorted({f"{call.error}: {call.error_text}" for call in wanted})
        return
    found = differences(wanted, seen, _may_share(program))
    if found:
        is_concurrent = program.settings["mode"] == "concurrent"
        count = _CONCURRENT_RUNS if is_concurrent else _RUNS
        again = [run_uncaptured(program, device) for _ in range(count)]
        if is_concurrent:
            raised = {
                message_of(call) for run_again in again for call in (*wanted, *run_again) if call.error
            }
            found = [difference for difference in found if difference.error not in raised]
        runs = [differences(wanted, run_again, _may_share(program)) for run_again in again]
        beyond = _judge(program, outcome, found, runs)
        if outcome.verdict == "wrong" and program.level == "compiled":
            is_of_graphs = device.startswith("cuda") and _differs_from_own_code(
                program, device, run, seen, outcome
            )
            if not is_of_graphs and _is_rounding(program, device, beyond):
                outcome.verdict = "by chance"
                outcome.detail.append("rounding anew, at random, moves the results as far")
        if outcome.verdict == "wrong":
            traces = [frame for call in seen for frame in call.error_trace]
            outcome.evidence = [*lines, *graphs, *traces[:40]]
    elif outcome.raised == outcome.calls:
        outcome.verdict = "raises"
        outcome.detail = sorted({f"{seen.error}: {seen.error_text}" for seen in wanted})


def _may_share(program: Program) -> bool:
    return program.kind != "inference" or program.settings.get("grad") == "training"


def _judge(
    program: Program, outcome: Outcome, found: list[Difference], runs: list[list[Difference]]
) -> list[Difference]:
    """Sets the verdict; the differences that are not within the limits for all programs."""
    varying = {(d.call, d.what): d.distance for run in runs for d in run}
    outcome.detail = [f"call {d.call}, {d.what}: {d.text}" for d in found[:6]]
    if not found:
        outcome.verdict = "by chance"
        return found
    flips = any(action in FLIPS for call in program.calls for action in call.before)
    is_by_chance = bool(varying) or program.has_chance or program.level == "compiled" or flips
    if not is_by_chance or any(d.what in ("error", "layout", "random", "shared") for d in found):
        outcome.verdict = "wrong"
        return found
    spread = max((d for d in varying.values() if math.isfinite(d)), default=0.0)
    beyond = [d for d in found if not d.distance <= max(_ROUNDING, _SPREAD * spread)]
    if not beyond:
        outcome.verdict = "by chance"
    elif varying or program.has_chance:
        outcome.verdict = "unjudged"  # rounding decides what is compared, ordered or selected later
    else:
        outcome.verdict = "wrong"
    return beyond


def _is_rounding(program: Program, device: str, found: list[Difference]) -> bool:
    """Whether code that rounds in another way may differ as much; see rounding.py."""
    if not all(math.isfinite(d.gap) for d in found):
        return False
    moved = moved_by_rounding(program, device)
    return all(d.gap <= _SPREAD * moved.get((d.call, d.what), 0.0) for d in found)


def _differs_from_own_code(
    program: Program, device: str, run: Run, seen: list[Seen], outcome: Outcome
) -> bool:
    """Whether the graphs make the difference, and not what PyGraph changes of the code."""
    from pygraph import runtime

    with runtime.uncaptured():
        uncaptured = series(program, device, run)
    blame = differences(uncaptured, seen, _may_share(program))
    outcome.detail.append(
        "uncaptured, the same compiled code differs from its graphs as well"
        if blame
        else "uncaptured, the same compiled code gives what its graphs give"
    )
    return bool(blame)


@contextlib.contextmanager
def _told(lines: Sequence[str]) -> Iterator[None]:
    """An error that ends the process tells what was logged."""
    try:
        yield
    except FatalError as error:
        raise FatalError("\n".join([str(error), *lines[-60:]])) from error


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """What PyGraph and the series log meanwhile."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Handler()
    logger = logging.getLogger("pygraph")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _graphs() -> list[str]:
    """Of each signature: its state, its replays, and where the graph's addresses are."""
    from pygraph import runtime

    found = []
    for partition in runtime.all_partitions():
        for entry in partition.entries.values():
            graph = entry.graph
            replays, link_map = (graph.replays, graph.link_map()) if graph is not None else (0, "")
            found.append(f"{partition.info.name}, {entry.state}, {replays} replays\n{link_map}")
    return found


def _compiled(program: Program, device: str, backend: str) -> Run:
    torch._dynamo.reset()
    return compiled_level.make(program, device, backend)


@contextlib.contextmanager
def _early_recording(program: Program, device: str) -> Iterator[None]:
    """As tests/gpu/conftest.py does, but for programs that run as shipped."""
    import os

    from pygraph import uncapturable
    from pygraph.partition import recording_policy

    old = recording_policy._RECORDED_AT_ONCE, recording_policy._RECORDED_AT_ONCE_IF_DYNAMIC
    select = os.environ.get("PYGRAPH_SELECT")
    is_shipped = program.settings["shipped"]
    if not is_shipped:
        recording_policy._RECORDED_AT_ONCE = 100
        recording_policy._RECORDED_AT_ONCE_IF_DYNAMIC = 100
    os.environ["PYGRAPH_SELECT"] = "auto" if is_shipped else "always"
    uncapturable._found.clear()
    try:
        yield
    finally:
        (
            recording_policy._RECORDED_AT_ONCE,
            recording_policy._RECORDED_AT_ONCE_IF_DYNAMIC,
        ) = old
        del os.environ["PYGRAPH_SELECT"]
        if select is not None:
            os.environ["PYGRAPH_SELECT"] = select


def _count(outcome: Outcome) -> None:
    import pygraph

    rows = pygraph.stats()
    outcome.replays = sum(row.replays for row in rows)
    outcome.states = dict(Counter(row.state for row in rows))
    outcome.reasons = dict(Counter(row.reason for row in rows if row.state == "refused"))


def _forget_graphs() -> None:
    """PyTorch itself may keep a compiled program for good (CompiledFunction, with generators)."""
    from pygraph import runtime

    runtime.partitions.clear()


@contextlib.contextmanager
def _memory_back(program: Program, device: str, outcome: Outcome) -> Iterator[None]:
    """Notes what stays allocated once the program is gone."""
    if not device.startswith("cuda"):
        yield
        return
    before = _allocated()
    yield
    if program.level == "compiled":
        torch._dynamo.reset()
    outcome.leaked = max(0, _allocated() - before)
    if outcome.leaked:
        import pygraph

        pygraph.reset()
        gc.collect()
        outcome.leaked = max(0, _allocated() - before)
    if outcome.leaked and program.level == "compiled":
        # PyTorch itself may keep compiled programs: one of each of the two series.
        outcome.leaked = max(0, outcome.leaked - 2 * _kept_uncaptured(program, device))


def _kept_uncaptured(program: Program, device: str) -> int:
    """Bytes that stay allocated after a series of calls without PyGraph."""
    before = _allocated()
    run_uncaptured(program, device)
    torch._dynamo.reset()
    gc.collect()
    return max(0, _allocated() - before)


def _allocated() -> int:
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()
