"""The steps by which a signature gets its graph.

The call is always made: by the verification, by the graph, or uncaptured. Any failure leaves the
signature uncaptured, in most cases for good, and its reason is kept.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from pygraph import runtime
from pygraph.gpu import allocator, current
from pygraph.options import Options
from pygraph.partition import audit
from pygraph.partition.attempt import Attempt, record_and_link, replay_unverified, verify_and_call
from pygraph.partition.call import Call, Function
from pygraph.partition.host import Host
from pygraph.partition.observed_effects import ObservedEffects
from pygraph.partition.recording_policy import RecordingPolicy
from pygraph.partition.selector import Selector
from pygraph.partition.signature import Entry, State
from pygraph.record import stream_capture
from pygraph.uncapturable import Compilation
from pygraph.undoing import Undo, undoing


def attempt(call: Call) -> Attempt:
    """Records, links, verifies. Always makes the call. Raises only what ``call.uncaptured`` raises."""
    written = set(call.effects.mutated)
    # Nothing executes: the function is recorded twice, for its addresses, and src/link.cc finds the
    # relocations. A pending recording is reused: all its results but the suspects were equal.
    recording = call.pending.recording if call.pending else record_and_link(call, written)
    if isinstance(recording, Attempt):
        result = recording
        result.outputs = call.uncaptured(call.args)
    else:
        # From here no relocation is added and the layout of memory is frozen.
        if call.options.verify:
            result = verify_and_call(recording, call, frozenset(written))
        else:
            result = replay_unverified(recording, call)
        result.returned = recording.returned
    # From here the call is made, and its arguments are gone.
    result.written = frozenset(written)
    return result


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Takes the signatures of one partition from their second call to the selection."""

    host: Host
    function: Function
    options: Options
    effects: ObservedEffects
    policy: RecordingPolicy
    selector: Selector
    compilation: Compilation | None

    def wait(self, key: bytes, entry: Entry, args: list[Any]) -> bool:
        """Tells the engine to run calls uncaptured until a recording is worth its time. False if it is
        now."""
        # The compiler puts integers last.
        has_numbers = any(isinstance(arg, int) for arg in reversed(args))
        decision = entry.selection.decision  # on disk: one of no graph has changed the entry's state
        seconds = self.policy.seconds_to_wait(has_numbers, is_selected=decision is not None)
        if seconds <= entry.recording.wait_seconds:
            return False
        runtime.engine().wait(self.host.callable, key, seconds - entry.recording.wait_seconds)
        entry.recording.wait_seconds = seconds
        return True

    def is_waiting(self, key: bytes, entry: Entry) -> bool:
        """Whether the signature was called more than once and is still to be recorded, or on trial."""
        if entry.state is State.MEASURING:
            return True
        left = runtime.engine().waiting_seconds(self.host.callable, key)
        return entry.state is State.UNCAPTURED and left < entry.recording.wait_seconds

    def call(self, key: bytes, entry: Entry, args: list[Any]) -> Sequence[Any]:
        """A call of a signature that has no graph yet."""
        if entry.recording.pending is None and self.wait(key, entry, args):
            return self.host.uncaptured(args)
        return self.record_call(key, entry, args)

    def record_call(self, key: bytes, entry: Entry, args: list[Any]) -> Sequence[Any]:
        """Makes a call that is worth a recording, unless the decision on disk is against a graph."""
        has_run_here = self.host.has_run_here
        if entry.recording.retries.is_to_skip(has_run_here):
            return self.host.uncaptured(args)

        def body(undo: Undo) -> Sequence[Any] | None:
            if not runtime.record_lock.take(undo):
                return self.host.uncaptured(args)  # another thread records; next time
            if self.host.entries.get(key) is not entry or entry.state is not State.UNCAPTURED:
                return self.host.uncaptured(args)  # another thread was first
            self.selector.load_decision(key, entry)
            if entry.state is not State.UNCAPTURED:
                return None
            current.use_device(self.host.info.device, undo)
            return self._capture(key, entry, args, has_run_here)

        outputs = undoing(body)
        return self.selector.recheck(key, entry, args) if outputs is None else outputs

    def _capture(self, key: bytes, entry: Entry, args: list[Any], has_run_here: bool) -> Sequence[Any]:
        at_stake = self._make_room(entry, args)
        start = time.perf_counter()
        try:
            if not has_run_here and entry.recording.retries.in_new_threads > 0:
                stream_capture.make_handles()
            result = attempt(self._call(entry, args, has_run_here))
        finally:
            seconds = time.perf_counter() - start
            self.policy.note_recording(seconds)
        args.clear()
        # From here the results are the caller's; nothing below may raise.
        self.effects.note_written(result.written)
        self._give_memory_back(at_stake)
        if self.host.entries.get(key) is not entry:  # reset meanwhile
            return result.outputs
        if result.is_transient or (result.raised and not has_run_here):
            # A later call may be recorded, or check the suspects: the reason may lie in this one, a
            # library without a handle for the thread, a memory pool of the program's, its stream.
            entry.recording.retries.note(result.is_transient)
            if entry.recording.retries.calls_to_skip > 0:
                entry.recording.pending = None  # all calls may be such: then they are recorded
            text = "%s: not recorded in this call: %s"
            runtime.note(logging.INFO, text, self.host.info.name, result.failure)
            return result.outputs
        with runtime.harmless("keeping a graph"):
            undoing(partial(self.conclude, entry, result, seconds))
        return result.outputs

    def _call(self, entry: Entry, args: list[Any], has_run_here: bool) -> Call:
        return Call(
            function=self.function,
            uncaptured=self.host.uncaptured,
            args=args,
            info=self.host.info,
            options=self.options,
            effects=self.effects.known,
            may_donate=entry.donation.is_allowed,
            pending=entry.recording.pending,
            kept=entry.selection.decision,
            is_new_thread=not has_run_here and entry.recording.retries.has_more_threads,
        )

    def _make_room(self, entry: Entry, args: list[Any]) -> int:
        """The bytes that the call works with. Empties the allocator's cache if they are many."""
        at_stake = 0
        with runtime.harmless("giving memory back"):
            entry.recording.bytes_not_copied = self.effects.bytes_not_copied(args)
            at_stake = allocator.bytes_on_gpu(args)
            allocator.give_back(after=at_stake)
        return at_stake

    def _give_memory_back(self, at_stake: int) -> None:
        """Releases memory that verification left in the allocator's cache: at the next call, and in
        training also at once, because a graph in use does not ask at its next call. Not while an
        inference's result is alive (docs/explanation/memory.md)."""
        with runtime.harmless("giving memory back"):
            allocator.give_back_at_next_call(after=at_stake)
            if self.host.info.kind != "inference":
                allocator.give_back(after=at_stake)

    def conclude(self, entry: Entry, result: Attempt, seconds: float, undo: Undo) -> None:
        """Refuses the signature, or begins the trial of its graph. seconds: the duration of the
        attempt. undo: gets a step that lets it be recorded again if an interrupt comes meanwhile."""
        entry.recording.pending = result.pending
        if result.pending is not None:
            entry.recording.have_differed |= set(result.pending.suspects)
        if result.failure:
            self.host.refuse(entry, result.failure + self._note_uncapturable(result))
        graph = result.graph
        if graph is None:
            return
        entry.recording.executable_bytes = result.executable_bytes
        entry.recording.returned = result.returned
        entry.recording.capture_seconds = seconds
        entry.audits = audit.schedule(graph, self.options.audit, self.host.info.compared_calls)
        is_over = False

        def begin_anew() -> None:
            if not is_over:
                runtime.engine().remove_graph(self.host.callable, graph)
                entry.begin_anew()

        # From here the graph is trusted.
        undo.append(begin_anew)
        entry.use(graph)
        text = "%s: captured %d nodes, %d relocations, in %.0f ms"
        name, milliseconds = self.host.info.name, seconds * 1e3
        runtime.note(logging.INFO, text, name, graph.nodes, graph.relocations, milliseconds)
        # Which is faster? The program's own calls decide.
        self.selector.begin_trial_or_install(entry)
        is_over = True

    def _note_uncapturable(self, result: Attempt) -> str:
        """The text to add to the reason if the program is compiled again; empty in most cases."""
        with runtime.harmless("noting what cannot be captured"):
            if self.compilation is not None and self.compilation.note_uncapturable(
                result.operator, result.failure
            ):
                return f"; recompiled, without {result.operator} in graphs"
        return ""
