"""A partition with a graph for each size of its argument, on the CPU, whose calls all take as long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pygraph import runtime
from pygraph.options import Options
from pygraph.partition import pipeline, timed_calls
from pygraph.partition.attempt import Attempt
from pygraph.partition.call import Call, SideEffects
from pygraph.partition.partition import Partition
from pygraph.partition.recording_policy import RecordingPolicy
from pygraph.select import decision_cache
from pygraph.select.trial import Sample

from . import audit_world
from .audit_world import Graph, World


class Many(audit_world.Engine):
    """A graph for each number of elements."""

    def __init__(self, real: Any) -> None:
        super().__init__(real)
        self.by_size: dict[int, Graph] = {}

    def graphed_callable(self, uncaptured: Any, miss: Any, device: int) -> Any:
        def call(args: list[Any]) -> Sequence[Any]:
            graph = self.by_size.get(args[0].numel())
            if graph not in self.graphs or graph.is_audit_due:
                return miss(args)  # type: ignore[no-any-return]
            self.remove_graph(None, graph)
            self.graphs.insert(0, graph)
            outputs = graph.replay(args, True)
            args.clear()
            return outputs

        return call

    def add_graph(self, callable: Any, graph: Graph, most: int, calls: int) -> list[Graph]:
        super().add_graph(callable, graph, most, calls)
        dropped, self.graphs = self.graphs[most:], self.graphs[:most]
        return dropped

    def signature(self, args: list[Any], device: int) -> bytes:
        return str(args[0].numel()).encode()


def without_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls take a millisecond, recordings are worth it at once; nothing is on disk."""
    runtime.partitions.clear()
    monkeypatch.setattr(decision_cache, "load", lambda key: None)
    monkeypatch.setattr(decision_cache, "save", lambda key, decision: None)
    monkeypatch.setattr(decision_cache, "key_of", lambda *parts: "key")

    def timed(run: Any, sleep: float) -> Any:
        result = run()
        return result, Sample(1e-3, device=1e-3) if sleep > 0 else Sample(1e-3, latency=1e-3)

    monkeypatch.setattr(timed_calls, "timed", timed)
    monkeypatch.setattr(RecordingPolicy, "seconds_to_wait", lambda *of, **how: 0.0)


def world_without_times(monkeypatch: pytest.MonkeyPatch) -> World:
    """What it computes adds one."""
    without_times(monkeypatch)
    return World(monkeypatch, lambda args: [args[0] + 1])


def wrong(args: list[Any]) -> list[Any]:
    return [args[0] + 2]


def for_many_sizes(
    world: World, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[Partition, dict[int, Graph]]:
    """A partition, and its graphs by size."""
    world.engine = engine = Many(runtime.engine())

    def uncaptured(args: list[Any]) -> list[Any]:
        outputs = world.function(args)
        args.clear()
        return outputs

    def attempt(call: Call) -> Attempt:
        graph = engine.by_size[call.args[0].numel()] = Graph(world.function)
        return Attempt(call.uncaptured(call.args), graph)

    monkeypatch.setattr(pipeline, "attempt", attempt)
    partition = Partition(uncaptured, audit_world.INFO, Options(**options))
    partition._effects.known = SideEffects()
    return partition, engine.by_size


def inputs(size: int = 4) -> list[Any]:
    return [torch.zeros(size)]


def wrong_results(partition: Partition, calls: int, size: int = 4) -> int:
    return sum(partition.callable(inputs(size))[0].tolist() != [1] * size for _ in range(calls))
