"""The state of a partition, and of each signature of its arguments.

Each module that handles a signature has a record in it, which no other module writes."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pygraph.partition.recording_policy import Retries
from pygraph.partition.unservable_calls import DonationState
from pygraph.record.recorder import Recording
from pygraph.select.trial import Decision, Trial
from pygraph.verify.audit_schedule import Audits

if TYPE_CHECKING:
    import torch

    from pygraph import _engine

Kind = Literal["forward", "backward", "inference"]  # the first two are of a training step


@dataclasses.dataclass(frozen=True)
class PartitionInfo:
    """Hints of the compiler about a partition. Correctness does not depend on them."""

    name: str  # the kind, with a number if there are several
    kind: Kind
    device: int
    argument_count: int  # as many as `static` and `mutated` speak of
    counts_numbers: bool  # whether argument_count includes the integers that follow the tensors
    static: frozenset[int] = frozenset()  # inputs that should keep their address
    mutated: frozenset[int] = frozenset()  # inputs that should be written
    saved: tuple[int, ...] = ()  # outputs that only backward will see
    on_host: frozenset[int] = frozenset()  # inputs that an uncaptured run needs on the CPU (Partition)
    saved_from: int | None = None  # outputs from here on, which only backward will see, too
    program: str = ""  # the same in every process that compiles the same code; empty if unknown
    # Whether it comes from a cache whose keys contain all of its code.
    is_loaded: bool = dataclasses.field(default=False, compare=False)
    compared_calls: int = 0  # replays that are compared, like audits, right after the verification
    runs_program: bool = False  # whether it calls the program's own Python, beside compiled code
    followed: tuple[str, ...] = ()  # numbers on the host that are inputs, by what they are
    # Tensors whose gradients are the last outputs, if replays are to set them, and the first of these.
    gradients: tuple[list[torch.Tensor], int] | None = dataclasses.field(
        default=None, repr=False, compare=False
    )
    # Inputs that only the partition's owner has, and that are the same tensors in each call, and the
    # position of the first.
    own: tuple[list[torch.Tensor], int] | None = dataclasses.field(
        default=None, repr=False, compare=False
    )

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole function of the program, and not the forward or the backward of one."""
        return self.runs_program and self.kind == "inference"

    @property
    def is_backward(self) -> bool:
        """Only a backward gets tensors that nothing else will read."""
        return self.kind == "backward"


class State(enum.Enum):
    """The state of one signature."""

    UNCAPTURED = "uncaptured"  # not recorded yet
    MEASURING = "measuring"  # captured, and on trial against the uncaptured run
    CAPTURED = "captured"
    NOT_SELECTED = "not selected"  # stays uncaptured because that is as fast; `reason` says how fast
    REFUSED = "refused"  # stays uncaptured, in most cases for good; `reason` says why


@dataclasses.dataclass(frozen=True)
class Pending:
    """A recording whose results were equal in the quick check, except for the suspects."""

    recording: Recording
    suspects: Sequence[int]
    executable_bytes: int


@dataclasses.dataclass
class RecordingState:
    """How the signature gets its graph. Written by pipeline.py."""

    wait_seconds: float = 0.0  # host time that uncaptured calls take before a recording
    retries: Retries = dataclasses.field(default_factory=Retries)
    pending: Pending | None = None  # until the next call has checked it thoroughly
    have_differed: frozenset[int] = frozenset()  # results, in a quick check
    capture_seconds: float = 0.0
    executable_bytes: int = 0
    bytes_not_copied: int = 0  # what Inductor's graphs would copy per call
    returned: frozenset[int] = frozenset()  # arguments that are results, or that results are views of


@dataclasses.dataclass
class SelectionState:
    """Which way of running the signature is faster. Written by selector.py."""

    trial: Trial | None = None  # while measuring
    decision: Decision | None = None
    cache_key: str = ""  # of the decision on disk; empty for none
    rechecks: int = 0  # of the decision, since it was made
    out_of_band: int = 0  # the last rechecks in a row that found another time than was measured


@dataclasses.dataclass
class Entry:
    """One signature of one partition. Its state changes by the methods below, which call nothing: so
    no interrupt comes in the middle."""

    state: State = State.UNCAPTURED
    reason: str = ""
    graph: _engine.CapturedGraph | None = None
    calls_until_retry: int = 0  # of one that is refused for now; 0: for good
    recording: RecordingState = dataclasses.field(default_factory=RecordingState)
    selection: SelectionState = dataclasses.field(default_factory=SelectionState)
    donation: DonationState = dataclasses.field(default_factory=DonationState)  # unservable_calls.py
    audits: Audits = dataclasses.field(default_factory=Audits)  # of the graph, or its last; audit.py

    @property
    def persistent_bytes(self) -> int:
        """Memory that the graph keeps between calls."""
        workspace = self.graph.workspace_bytes if self.graph is not None else 0
        return workspace + self.recording.executable_bytes

    def use(self, graph: _engine.CapturedGraph) -> None:
        """Makes the verified graph serve the signature's calls."""
        self.graph, self.state = graph, State.CAPTURED

    def begin_anew(self) -> None:
        """The signature is recorded again; its graph is not used."""
        self.state, self.graph = State.UNCAPTURED, None

    def measure(self, trial: Trial) -> None:
        """The graph is on trial."""
        self.state = State.MEASURING
        self.selection.trial = trial

    def decide(self, decision: Decision, reason: str) -> None:
        """The trial is over. reason: why calls stay uncaptured; empty if the graph serves them."""
        self.selection.trial, self.selection.decision = None, decision
        if reason:
            self.state, self.reason, self.graph = State.NOT_SELECTED, reason, None
        else:
            self.state = State.CAPTURED

    def deselect(self, reason: str) -> None:
        """Calls stay uncaptured because that is as fast."""
        self.state, self.reason, self.graph = State.NOT_SELECTED, reason, None

    def refuse(self, reason: str, calls_until_retry: int) -> None:
        """Calls stay uncaptured. calls_until_retry: 0 for good."""
        self.state, self.reason, self.graph = State.REFUSED, reason, None
        self.calls_until_retry = calls_until_retry
        self.recording.pending = None
        self.selection.trial = self.selection.decision = None
        self.selection.rechecks = 0  # the engine is to be told
