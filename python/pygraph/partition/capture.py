"""One call that is recorded, and verified against the uncaptured run. Always makes the call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pygraph import runtime, uncapturable
from pygraph.gpu import allocator
from pygraph.options import Options
from pygraph.partition.signature import PartitionInfo, Pending
from pygraph.record import recorder
from pygraph.verify import verify

Function = Callable[[list[Any]], Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class SideEffects:
    """What a function does besides returning results, as far as it is known.

    mutated: positions of inputs that it may write: after a recording of their signature, all of them.
    Before, those that the compiler names and those that a watched call has changed.
    """

    mutated: frozenset[int] = frozenset()
    draws: bool = False  # whether it uses the device's default generator


@dataclasses.dataclass
class Attempt:
    """outputs: the call's result. graph: to be used from now on; None if it failed or is pending.

    failure: why it failed, for good. raised: whether the capture raised, as it may where the thread has
    not run the function before. is_transient: whether that is due to this call alone.
    operator: the one whose capture was refused, if that is known.
    written: positions of inputs that the function may write, as the recording shows.
    returned: positions of inputs that are results, or that results are views of.
    pending: what the next attempt is to look at closer.
    """

    outputs: Sequence[Any]
    graph: Any = None  # pygraph._engine.CapturedGraph
    failure: str = ""
    operator: str = ""
    written: frozenset[int] = frozenset()
    returned: frozenset[int] = frozenset()
    pending: Pending | None = None
    executable_bytes: int = 0
    raised: bool = False
    is_transient: bool = False


def attempt(
    function: Function,
    uncaptured: Function,
    args: list[Any],
    info: PartitionInfo,
    options: Options,
    effects: SideEffects,
    takes_memory: bool,
    pending: Pending | None,
) -> Attempt:
    """Records ``function`` on ``args`` and makes the call, by ``uncaptured`` or by the graph.

    takes_memory: whether the graph may use that of arguments which the call gives away.
    pending: of an earlier attempt. Its recording is taken instead of a new one, because only that one
    is known to be right in everything but the suspects.
    Raises only what ``uncaptured`` raises.
    """
    written = set(effects.mutated)
    recording = (
        pending.recording
        if pending
        else _record(function, args, info, options, effects, takes_memory, written)
    )
    effects = dataclasses.replace(effects, mutated=frozenset(written))
    if isinstance(recording, Attempt):
        result = recording
        result.outputs = uncaptured(args)
    else:
        result = _use(recording, uncaptured, args, options, effects, pending)
        result.returned = recording.returned
    result.written = effects.mutated
    return result


def _use(
    recording: recorder.Recording,
    uncaptured: Function,
    args: list[Any],
    options: Options,
    effects: SideEffects,
    pending: Pending | None,
) -> Attempt:
    """Makes the call; says whether the graph is to be used."""
    if options.verify:
        run = verify.Run(uncaptured, args, recording, effects.mutated)
        result = verify.verify(run, pending.suspects if pending else ())
        taken = result.executable_bytes + (pending.executable_bytes if pending else 0)
        if result.suspects:
            return Attempt(result.outputs, pending=Pending(recording, result.suspects, taken))
        verified = None if result.failure else recording.graph
        failure = result.failure
        if result.is_wrong and recording.graph.doubtful_use:
            failure += f"; {recording.graph.doubtful_use}"
        return Attempt(result.outputs, verified, failure, executable_bytes=taken)
    if recording.graph.unexplained_words > 0:
        reason = "some parameters look like unknown addresses, and verify is off"
        return Attempt(uncaptured(args), failure=reason)
    try:
        return Attempt(recording.graph.replay(args, True), recording.graph)
    except RuntimeError as error:  # nothing was launched
        failure = recorder.describe_failure(error)
    return Attempt(uncaptured(args), failure=failure)


def _record(
    function: Function,
    args: list[Any],
    info: PartitionInfo,
    options: Options,
    effects: SideEffects,
    takes_memory: bool,
    written: set[int],
) -> recorder.Recording | Attempt:
    """The recording, or why there is none: any failure leaves the program uncaptured."""
    can_take = info.is_backward and takes_memory
    try:
        recording = recorder.record(
            function,
            args,
            info.device,
            draws=effects.draws,
            sharing=None if info.is_backward else info.saved,
            given_away=runtime.engine().given_away(args) if can_take else [],
            capacity=options.record_capacity_gib << 30,
            lanes=options.lanes if options.verify else 1,  # branches are timed while verifying
            written=written,
        )
        recording.graph.name = f"pygraph {info.name}"
        return recording
    except Exception as error:
        failed = Attempt((), failure=recorder.describe_failure(error))
        failed.raised = not isinstance(error, runtime.engine().NotRelocatable)
        failed.is_transient = isinstance(error, (recorder.PoolInUse, runtime.OthersDraw))
        if not isinstance(error, torch.OutOfMemoryError):
            failed.operator = uncapturable.operator_in(error)
    # The error, which held what the recording had, is gone.
    recorder.check_abandoned()
    allocator.give_back_all()
    return failed
