"""The steps of an attempt to get a graph: recording and linking; verification, which makes the call.

Each step turns its failures into reasons. Memory that an error's frames held is free when the call is
made.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from pygraph import runtime, signal_exceptions, uncapturable
from pygraph.gpu import allocator, current
from pygraph.partition.call import Call
from pygraph.partition.signature import Pending
from pygraph.record import recorder, stream_capture
from pygraph.record.hidden_capture import HiddenCapture
from pygraph.verify import verify
from pygraph.verify.rehearsal import Rehearsal

if TYPE_CHECKING:
    from pygraph import _engine


@dataclasses.dataclass
class Attempt:
    """The result of an attempt.

    outputs: the call's results. graph: the verified graph; None if the attempt failed or is pending.
    failure: the reason of a failure; empty if there is none.
    raised: whether the capture raised, perhaps because the thread has not run the function before.
    is_transient: whether the cause lies in this call alone.
    operator: the operator that could not be captured, if known.
    written: positions of inputs that the function may write, from the recording.
    returned: positions of inputs that are results, or of which results are views.
    pending: the recording and the suspects, for the thorough check of the next attempt.
    """

    outputs: Sequence[Any]
    graph: _engine.CapturedGraph | None = None
    failure: str = ""
    operator: str = ""
    written: frozenset[int] = frozenset()
    returned: frozenset[int] = frozenset()
    pending: Pending | None = None
    executable_bytes: int = 0
    raised: bool = False
    is_transient: bool = False


def record_and_link(call: Call, written: set[int]) -> recorder.Recording | Attempt:
    """Returns the recording, or a failed attempt whose call is not made yet.

    A program that asks whether its stream captures goes the way of its uncaptured calls first; if that
    cannot be recorded, the one that it has for captures. written: gets the positions of inputs that the
    function may write, also if linking fails.
    """
    if not call.info.runs_program:
        return _record_and_link(call, written, None)
    hidden = HiddenCapture()
    result = _record_and_link(call, written, hidden)
    if isinstance(result, recorder.Recording) or not hidden.was_asked or _may_pass(result, call):
        return result
    text = "%s: recorded again, as one that knows that it is captured: %s"
    runtime.note(logging.INFO, text, call.info.name, result.failure)
    return _record_and_link(call, written, None)


def _may_pass(failed: Attempt, call: Call) -> bool:
    """Whether a later call may be recorded in the same way."""
    if failed.raised and call.is_new_thread:
        return True
    return failed.is_transient or failed.failure.endswith(recorder.OUT_OF_MEMORY)


def _record_and_link(
    call: Call, written: set[int], hidden: HiddenCapture | None
) -> recorder.Recording | Attempt:
    can_donate = call.info.is_backward and call.may_donate and current.stream_lasts(call.info.device)
    try:
        recording = recorder.record(
            recorder.Request(
                function=call.function,
                args=call.args,
                device=call.info.device,
                draws=call.effects.draws,
                sharing=None if call.info.is_backward else call.info.saved,
                sharing_from=call.info.saved_from,
                gradients=_gradients_of(call) if call.info.kind == "forward" else (),
                given_away=runtime.engine().given_away(call.args) if can_donate else [],
                capacity=call.options.record_capacity_gib << 30,
                lanes=_lanes(call),
                written=written,
                hidden=hidden,
            )
        )
        recording.graph.name = f"pygraph {call.info.name}"
        return recording
    except Exception as error:
        raised = signal_exceptions.raised_by_handler(error)
        is_memory_short = isinstance(error, torch.OutOfMemoryError)
        failed = Attempt(
            (),
            failure=recorder.describe_failure(error),
            operator="" if is_memory_short else uncapturable.operator_in(error),
            raised=not isinstance(error, runtime.engine().NotRelocatable),
            is_transient=isinstance(error, (stream_capture.PoolInUse, runtime.OthersDraw)),
        )
    if raised is not None:  # (Where it is raised again, it gets the program's context.)
        raised.__traceback__ = raised.__context__ = None
    # From here the errors are gone, whose frames held the recording's memory.
    stream_capture.check_abandoned()
    allocator.give_back_all()
    if is_memory_short:
        allocator.drop_blocks(call.info.device)  # the uncaptured call follows
    if raised is not None:
        signal_exceptions.raise_without_frames(raised)
    return failed


def _gradients_of(call: Call) -> list[int]:
    """Bytes of each gradient that the backward of a forward will compute."""
    tensors = [arg for arg in call.args if isinstance(arg, torch.Tensor)]
    strided = [arg for arg in tensors if arg.is_cuda and arg.layout is torch.strided]
    return [arg.nbytes for arg in strided if arg.requires_grad]


def _lanes(call: Call) -> int:
    """How many nodes may run at the same time. Branches are timed during verification, so without it
    there are none; nor where the graph of an earlier process had none."""
    keeps_order = call.kept is not None and call.kept.branches is False
    return call.options.lanes if call.options.verify and not keeps_order else 1


def verify_and_call(recording: recorder.Recording, call: Call, mutated: frozenset[int]) -> Attempt:
    """Compares a replay with the uncaptured run, which makes the call.

    mutated: positions of inputs that the function may write.
    """
    rehearsal = Rehearsal(call.uncaptured, call.args, recording, mutated)
    result = verify.verify(rehearsal, call.pending.suspects if call.pending else (), call.kept)
    taken = result.executable_bytes + (call.pending.executable_bytes if call.pending else 0)
    if result.suspects:
        return Attempt(result.outputs, pending=Pending(recording, result.suspects, taken))
    has_cpu_tensor = any(isinstance(x, torch.Tensor) and x.is_cpu for x in result.outputs)
    failure = result.failure or _saved_elsewhere(has_cpu_tensor)
    return Attempt(
        result.outputs,
        None if failure else recording.graph,
        failure,
        executable_bytes=taken,
        is_transient=result.is_transient,
    )


def _saved_elsewhere(saves_random_state: bool) -> str:
    """Why the graph must not be used where hooks of saved tensors are active; empty if it may.

    saves_random_state: whether an uncaptured run may do so on the CPU.

    Attention keeps the random state of its dropout on the CPU when it runs uncaptured, and on the GPU
    in a graph. Activation checkpointing, which uses such hooks, raises where what two forwards save
    differs in that, and one of them may be uncaptured. (The engine counts hooks among the switches, so
    graphs that were recorded without them are not used under them.)
    """
    if not saves_random_state or torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return ""
    return "hooks of saved tensors are active, and a graph would save on the GPU what is on the CPU"


def replay_unverified(recording: recorder.Recording, call: Call) -> Attempt:
    """Makes the call by a replay, without verification (`pygraph.verify` False)."""
    failure = _saved_elsewhere(call.effects.draws)  # no uncaptured run shows where it saves
    if recording.graph.unexplained_words > 0:
        failure = "some parameters look like unknown addresses, and verify is off"
    if not failure:
        try:
            return Attempt(recording.graph.replay(call.args, True), recording.graph)
        except RuntimeError as error:  # nothing was launched
            failure = recorder.describe_failure(error)
        if failure.endswith(recorder.OUT_OF_MEMORY):
            allocator.drop_blocks(call.info.device)
    return Attempt(call.uncaptured(call.args), failure=failure)
