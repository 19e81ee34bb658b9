"""An engine, graphs and generators made up on the CPU, for partitions whose graphs are in use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraph import runtime
from pygraph.gpu import allocator, current
from pygraph.options import Options
from pygraph.partition import audit_replay, pipeline
from pygraph.partition.attempt import Attempt
from pygraph.partition.call import Call, SideEffects
from pygraph.partition.observed_effects import ObservedEffects
from pygraph.partition.partition import Partition
from pygraph.partition.signature import Entry
from pygraph.verify import verify
from pygraph.verify.rehearsal import Rehearsal

from .fake_engine import FakeGraph
from .stand_ins import INFO, verify_on_the_cpu

Function = Callable[[list[Any]], list[Any]]


class Generator:
    """Of random numbers; as much of one as graphs and audits use."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset

    def draw(self) -> int:
        self.offset += 4
        return self.offset

    def clone_state(self) -> Generator:
        return Generator(self.offset)

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


class Graph(FakeGraph):
    """A captured graph in use; only audits meet its error."""

    def __init__(self, function: Function) -> None:
        super().__init__(function, replays=3)  # of its verification

    def replay(
        self, arguments: list[Any], gives_away: bool, poison: int = -1, generator: Any = None
    ) -> Sequence[Any]:
        generator = generator or torch.cuda.default_generators[0]
        error = self.error
        if poison < 0:
            self.error = None
        try:
            return super().replay(arguments, gives_away, poison, generator)
        finally:
            self.error = error


class Engine:
    """Replays the graphs that it was told of, unless an audit is due, as the real one does."""

    StreamNotReady, NotGivenAway, DriverError = (
        type(name, (RuntimeError,), {}) for name in ("StreamNotReady", "NotGivenAway", "DriverError")
    )

    def __init__(self, real: Any) -> None:
        self.memory_of = real.memory_of
        self.graphs: list[Graph] = []
        self.without_graph: list[int] = []
        self.given_away_positions: list[int] = []
        self.dropped: list[int] = []  # devices whose blocks were dropped
        self._calls = self._calls_per_recheck = 0

    def graphed_callable(self, uncaptured: Any, miss: Any, device: int) -> Any:
        def call(args: list[Any]) -> Sequence[Any]:
            if not self.graphs or self._is_recheck_due() or self.graphs[0].is_audit_due:
                return miss(args)  # type: ignore[no-any-return]
            outputs = self.graphs[0].replay(args, True)
            args.clear()
            return outputs

        return call

    def _is_recheck_due(self) -> bool:
        self._calls += 1
        return 0 < self._calls_per_recheck < self._calls

    def add_graph(self, callable: Any, graph: Graph, most: int, calls: int) -> list[Graph]:
        self.remove_graph(callable, graph)
        self.graphs.insert(0, graph)
        self._calls, self._calls_per_recheck = 0, calls
        return []

    def remove_graph(self, callable: Any, graph: Graph) -> None:
        self.graphs = [other for other in self.graphs if other is not graph]

    def given_away(self, args: list[Any]) -> list[Any]:
        return [SimpleNamespace(positions=[i]) for i in self.given_away_positions]

    def signature(self, args: list[Any], device: int) -> bytes:
        return b"key"

    def add_uncaptured_decision(self, callable: Any, args: list[Any], calls: int) -> None:
        self.without_graph.append(calls)

    def clear_decisions(self, callable: Any) -> None:
        self.graphs.clear()

    def wait(self, callable: Any, key: bytes, seconds: float) -> None:
        pass

    def clear_waiting(self, callable: Any) -> None:
        pass

    clear_uncaptured_decisions = clear_waiting
    free_blas_workspaces = staticmethod(lambda: None)

    def drop_blocks(self, device: int) -> None:
        self.dropped.append(device)

    needs_new_executable = staticmethod(lambda: False)


class World:
    """One partition whose second call was captured; ``function`` is what it computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, function: Function) -> None:
        self.engine = Engine(runtime.engine())
        self.free_bytes = 1 << 40
        self.default_generator = Generator()
        self.calls = 0  # uncaptured ones, on clones included
        self.function = function
        verify_on_the_cpu(monkeypatch)
        for owner, name, value in (
            (runtime, "engine", lambda: self.engine),
            (current, "use_device", lambda index, undo: None),
            (torch.cuda, "default_generators", (self.default_generator,)),
            (audit_replay, "free_bytes", lambda: self.free_bytes),
            (audit_replay, "_kept_bytes", lambda: 0),
            (allocator, "give_back_all", lambda: None),
            (verify, "_foreign_bytes", lambda: 0),
            (Rehearsal, "_results", _results),
            (ObservedEffects, "watched_call", lambda self, args, run: (run(args), "")),
        ):
            monkeypatch.setattr(owner, name, value)
        self._monkeypatch = monkeypatch
        self.graph = Graph(function)

    def partition(
        self, inputs: Callable[[], list[Any]], written: frozenset[int] = frozenset(), **own: Any
    ) -> Partition:
        """After its second call, which was captured."""

        def uncaptured(args: list[Any]) -> list[Any]:
            self.calls += 1
            outputs = self.function(args)
            args.clear()
            return outputs

        def attempt(call: Call) -> Attempt:
            return Attempt(call.uncaptured(call.args), self.graph)

        self._monkeypatch.setattr(pipeline, "attempt", attempt)
        partition = Partition(uncaptured, INFO, Options(select="always", **own))
        partition._effects.known = SideEffects(mutated=written)
        for _ in range(2):
            partition.callable(inputs())
        self.calls = 0
        return partition


def _results(run: Any, outputs: Sequence[Any], args: Any) -> list[torch.Tensor]:
    return [*outputs, *(args[i] for i in run.visible)]


def only_entry(partition: Partition) -> Entry:
    (entry,) = partition.entries.values()
    return entry
