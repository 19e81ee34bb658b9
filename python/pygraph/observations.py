"""Notes about the compilation of a program, kept while a report is made."""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

from torch import fx

from pygraph import runtime
from pygraph.runtime import AnyPartition


def is_pytorchs(filename: str) -> bool:
    """Whether a frame of a program is PyTorch's own, and not the user's."""
    return "/torch/" in filename


def line_of(frames: Iterable[traceback.FrameSummary]) -> str:
    """The "file:line" of the last frame that is the user's; empty if there is none."""
    users = [f"{f.filename}:{f.lineno}" for f in frames if not is_pytorchs(f.filename)]
    return users[-1] if users else ""


@dataclasses.dataclass(frozen=True)
class Applied:
    """One applied transformation. where: the user's "file:line", or empty."""

    transform: str
    what: str
    where: str


@dataclasses.dataclass(frozen=True)
class Cut:
    """A place where a program leaves its graphs, or a graph that was refused.

    kind: "cut" inside a compiled program, "graph break" between two, "refusal" of a graph.
    where: the user's "file:line", or empty. remedy: what to change to remove it, or empty.
    """

    kind: str
    reason: str
    where: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class PlainLoop:
    """A place where a program trains without a graph of its step.

    where: the first "file:line". calls: the training calls that were seen there, with their lines.
    code: the function to write.
    """

    where: str
    calls: tuple[str, ...]
    code: str


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a generated kernel computes. where: the user's "file:line"s, in no order of importance."""

    operators: tuple[str, ...]
    where: tuple[str, ...]

    def with_those_of(self, other: Origin) -> Origin:
        """Both origins in one, for two kernels of the same name in two graphs."""
        return Origin(
            tuple(dict.fromkeys(self.operators + other.operators)),
            tuple(dict.fromkeys(self.where + other.where)),
        )


@dataclasses.dataclass
class Observation:
    """graphs: (name, post-grad graph after the transformations); their notes are in `applied`.

    partitions: kept alive here, as a script's models end before its report is written.
    origins: of generated kernels, by their names.
    """

    graphs: list[tuple[str, fx.Graph]] = dataclasses.field(default_factory=list)
    partitions: list[AnyPartition] = dataclasses.field(default_factory=list)
    applied: list[Applied] = dataclasses.field(default_factory=list)
    breaks: list[Cut] = dataclasses.field(default_factory=list)
    origins: dict[str, Origin] = dataclasses.field(default_factory=dict)

    def note_graph(self, name: str, graph: fx.Graph, applied: list[Applied]) -> None:
        owner = graph.owning_module
        # The compiler goes on changing the graph: keep a copy, with its values and lines.
        self.graphs.append((name, fx.GraphModule(owner, _copy(graph)).graph if owner else graph))
        for note in applied:
            self.note_applied(note)

    def forget(self, graphs: Iterable[Any], partitions: Collection[AnyPartition]) -> None:
        """Forgets graphs and partitions of a program that is compiled again."""
        gone = {id(graph) for graph in graphs}
        self.graphs = [graph for graph in self.graphs if id(graph) not in gone]
        self.partitions = [partition for partition in self.partitions if partition not in partitions]

    def note_applied(self, note: Applied) -> None:
        if note not in self.applied:  # Dynamo traces a function again after a graph break
            self.applied.append(note)

    def note_origins(self, origins: Mapping[str, Origin]) -> None:
        for name, origin in origins.items():
            known = self.origins.get(name)
            self.origins[name] = origin if known is None else known.with_those_of(origin)

    def note_break(self, reason: Any) -> None:
        """reason: torch._dynamo's GraphCompileReason of the graph that follows, or None."""
        if reason is None or not reason.graph_break:
            return
        remedy = "let torch.compile trace through it, or move it out"
        text = runtime.first_line(reason.reason)
        cut = Cut("graph break", text, line_of(reason.user_stack), remedy)
        if cut not in self.breaks:
            self.breaks.append(cut)


def _copy(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    output = copy.graph_copy(graph, {})
    copy.output(output)
    return copy


class Tally(Protocol):
    """Counts what is compiled, for a summary (:class:`pygraph.report.summary.Tally`)."""

    def note_program(self) -> None: ...

    def note_graph(self, graph: fx.Graph) -> None: ...

    def note_partition(self, partition: AnyPartition) -> None: ...


tally: Tally | None = None  # of the process, if a summary was asked for
_current: Observation | None = None


def current() -> Observation | None:
    return _current


def note_partition(partition: AnyPartition) -> None:
    """Lists a new partition, or graphed callable, in the process and in the report that is made."""
    runtime.partitions.add(partition)
    observation = _current  # another thread may end it meanwhile
    if observation is not None:
        observation.partitions.append(partition)


@contextlib.contextmanager
def observing() -> Iterator[Observation]:
    """Notes what is compiled inside the context, in any thread. Not to be nested."""
    global _current
    _current = Observation()
    try:
        yield _current
    finally:
        _current = None
