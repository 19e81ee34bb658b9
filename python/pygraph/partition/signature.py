"""What is known of a partition, and of each signature of its arguments."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, Literal

from pygraph.record.recorder import Recording
from pygraph.select.trial import Decision, Trial
from pygraph.verify.audit_schedule import Audits

Kind = Literal["forward", "backward", "inference"]  # the first two are of a training step


@dataclasses.dataclass(frozen=True)
class PartitionInfo:
    """What the compiler says of a partition. Hints: nothing relies on them for correctness."""

    name: str  # the kind, with a number if there are several
    kind: Kind
    device: int
    argument_count: int  # as many as `static` and `mutated` speak of
    counts_numbers: bool  # whether argument_count includes the integers that follow the tensors
    static: frozenset[int]  # inputs that should keep their address
    mutated: frozenset[int]  # inputs that should be written
    saved: tuple[int, ...]  # outputs that only backward will see
    on_host: frozenset[int]  # inputs that an uncaptured run needs on the CPU (see Partition)
    program: str = ""  # the same in every process that compiles the same code; empty if unknown

    @property
    def is_backward(self) -> bool:
        """Only a backward is given tensors that nobody else will read."""
        return self.kind == "backward"


class State(enum.Enum):
    """What became of one signature."""

    UNCAPTURED = "uncaptured"  # not recorded yet
    MEASURING = "measuring"  # captured, and on trial against the uncaptured run
    CAPTURED = "captured"
    NOT_SELECTED = "not selected"  # stays uncaptured because that is as fast; `reason` says how fast
    REFUSED = "refused"  # stays uncaptured, in most cases for good; `reason` says why


@dataclasses.dataclass(frozen=True)
class Pending:
    """A recording of which a first look found all results equal but the suspects."""

    recording: Recording
    suspects: Sequence[int]
    executable_bytes: int


@dataclasses.dataclass
class Entry:
    """One signature of one partition."""

    state: State = State.UNCAPTURED
    reason: str = ""
    graph: Any = None  # pygraph._engine.CapturedGraph
    pending: Pending | None = None  # until the next call has looked closer
    copied_bytes: int = 0  # what Inductor's graphs would copy per call
    capture_seconds: float = 0.0
    waits_seconds: float = 0.0  # host time that uncaptured calls take before a recording
    executable_bytes: int = 0
    returned: frozenset[int] = frozenset()  # arguments that are results, or that results are views of
    audits: Audits = dataclasses.field(default_factory=Audits)  # of the graph, or the one it had
    trial: Trial | None = None  # while measuring
    decision: Decision | None = None
    key: str = ""  # of the decision on disk; empty for none
    looks: int = 0  # at the decision, since it was made
    calls_until_retry: int = 0  # of one that is refused for now; 0: for good
    counted: tuple[int, int] = (0, 0)  # replays, and nodes touched in them (see device_patching.py)
    has_tried_device: bool = False  # whether it was tried to patch the graph on the device
    # Captures that raised in threads that had not run the function before.
    raised_in_new_threads: int = 0
    # Calls that could not be recorded for a reason of their own, and calls until it is tried again.
    not_now: int = 0
    calls_to_skip: int = 0
    looks_outside: int = 0  # the last ones in a row that found another time than was measured
    # Whether a graph may use the memory of arguments that calls give away. Calls that keep what it
    # uses: two for each, less one for each replay since; and the replays until the last of them.
    takes_memory: bool = True
    kept: int = 0
    replays_until_kept: int = 0

    @property
    def kept_bytes(self) -> int:
        """Memory that the graph keeps between calls."""
        return int(self.graph.workspace_bytes) + self.executable_bytes

    @property
    def is_under_way(self) -> bool:
        """Whether an attempt has been made that the next call is to go on with."""
        return self.pending is not None
