"""An engine, graphs and generators made up on the CPU, for partitions whose graphs are in use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraph import runtime
from pygraph.gpu import allocator
from pygraph.options import Options
from pygraph.partition import audit_look
from pygraph.partition import partition as partition_module
from pygraph.partition.capture import Attempt, SideEffects
from pygraph.partition.partition import Partition
from pygraph.partition.signature import Entry
from pygraph.verify import verify

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


class Graph:
    """A captured graph in use: runs a function, and then does what the test makes it do."""

    output_bytes = block_bytes = workspace_bytes = 0
    nodes = relocations = symbols = nodes_touched = calls_elsewhere = nodes_on_device = 0
    lanes = 1
    is_patched_on_device = False
    failure = ""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.replays = 3  # of its verification
        self.audit_at: int | None = None
        self.donated: tuple[int, ...] = ()
        self.random_arguments: list[int] = []
        self.error: Exception | None = None
        self.poisons: list[int] = []
        self.generator: Any = None  # of the replay under way

    @property
    def is_audit_due(self) -> bool:
        return self.audit_at is not None and self.replays >= self.audit_at

    def matches(self, args: list[Any]) -> bool:
        return True

    def release_workspace(self) -> None:
        pass

    def settle_workspace(self) -> None:
        pass

    def replay(
        self, args: list[Any], gives_away: bool, poison: int = -1, generator: Any = None
    ) -> list[Any]:
        if self.error is not None and poison >= 0:
            raise self.error
        self.replays += 1
        self.poisons.append(poison)
        self.generator = generator or torch.cuda.default_generators[0]
        return self.function(args)


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
        self._calls = self._calls_per_look = 0

    def graphed_callable(self, uncaptured: Any, miss: Any, device: int) -> Any:
        def call(args: list[Any]) -> Sequence[Any]:
            if not self.graphs or self._is_look_due() or self.graphs[0].is_audit_due:
                return miss(args)  # type: ignore[no-any-return]
            outputs = self.graphs[0].replay(args, True)
            args.clear()
            return outputs

        return call

    def _is_look_due(self) -> bool:
        self._calls += 1
        return 0 < self._calls_per_look < self._calls

    def add_graph(self, callable: Any, graph: Graph, most: int, calls: int) -> list[Graph]:
        self.remove_graph(callable, graph)
        self.graphs.insert(0, graph)
        self._calls, self._calls_per_look = 0, calls
        return []

    def remove_graph(self, callable: Any, graph: Graph) -> None:
        self.graphs = [other for other in self.graphs if other is not graph]

    def given_away(self, args: list[Any]) -> list[Any]:
        return [SimpleNamespace(positions=[i]) for i in self.given_away_positions]

    def signature(self, args: list[Any], device: int) -> bytes:
        return b"key"

    def add_without_graph(self, callable: Any, args: list[Any], calls: int) -> None:
        self.without_graph.append(calls)

    def clear_decided(self, callable: Any) -> None:
        self.graphs.clear()

    def wait(self, callable: Any, key: bytes, seconds: float) -> None:
        pass

    clear_waiting = clear_without_graph = wait
    free_blas_workspaces = staticmethod(lambda: None)


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
            (torch.cuda, "device", lambda index: contextlib.nullcontext()),
            (torch.cuda, "default_generators", (self.default_generator,)),
            (audit_look, "_free_bytes", lambda: self.free_bytes),
            (audit_look, "_kept_bytes", lambda: 0),
            (allocator, "give_back_all", lambda: None),
            (verify, "_foreign_bytes", lambda: 0),
            (verify.Run, "_results", _results),
            (Partition, "_watched_call", lambda partition, entry, args: partition.uncaptured(args)),
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

        def attempt(function: Any, uncaptured: Any, args: list[Any], *rest: Any) -> Attempt:
            return Attempt(uncaptured(args), self.graph)

        self._monkeypatch.setattr(partition_module.capture, "attempt", attempt)
        partition = Partition(uncaptured, INFO, Options(select="always", **own))
        partition._effects = SideEffects(mutated=written)
        for _ in range(2):
            partition.callable(inputs())
        self.calls = 0
        return partition


def _results(run: Any, outputs: Sequence[Any], args: Any) -> list[torch.Tensor]:
    return [*outputs, *(args[i] for i in run._visible)]


def only_entry(partition: Partition) -> Entry:
    (entry,) = partition.entries.values()
    return entry
