"""The GPU time of each graph, from traces as PyTorch's profiler writes them."""

from __future__ import annotations

from typing import Any

import pytest

from pygraph.observations import Observation
from pygraph.options import Options
from pygraph.partition.partition import Partition
from pygraph.partition.signature import Entry, State
from pygraph.report import measure
from pygraph.report.graph_times import graph_times

from .fake_engine import FakeGraph
from .stand_ins import INFO

_NAMES = ("a", "b")


def _range(name: str, begin: float, external_id: int, thread: int = 1) -> dict[str, Any]:
    arguments = {"External id": external_id, "Record function id": 0}
    event = {"ph": "X", "cat": "user_annotation", "name": name, "pid": 7, "tid": thread}
    return {**event, "ts": begin, "dur": 10.0, "args": arguments}


def _call(name: str, correlation: int, at: float, thread: int = 1) -> dict[str, Any]:
    arguments = {"correlation": correlation, "External id": 0}
    event = {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 7, "tid": thread}
    return {**event, "ts": at, "dur": 1.0, "args": arguments}


def _kernel(correlation: int, us: float, external_id: int | None = None) -> dict[str, Any]:
    arguments: dict[str, Any] = {"correlation": correlation, "stream": 7}
    if external_id is not None:
        arguments["External id"] = external_id
    event = {"ph": "X", "cat": "kernel", "name": "kernel", "pid": 0, "tid": 7}
    return {**event, "ts": 1000.0, "dur": us, "args": arguments}


def test_launches_of_the_driver_are_told_by_their_order() -> None:
    events = [
        {"ph": "M", "name": "process_name", "pid": 7},
        _kernel(30, 5.0),  # the trace has no order
        _kernel(10, 1.0),
        _kernel(10, 2.0),
        _range("b", 100.0, 0),
        _range("a", 0.0, 0),
        _range("a", 200.0, 0),
        _kernel(20, 4.0),
        _call("cudaLaunchKernel", 15, 50.0),
        _kernel(15, 100.0),  # uncaptured
    ]
    assert graph_times(events, _NAMES) == {"a": 8.0, "b": 4.0}


def test_launches_that_are_traced_lie_in_their_range() -> None:
    events = [
        _range("a", 0.0, 0),
        _range("b", 0.0, 0, thread=2),  # at the same time
        _call("cudaGraphLaunch", 10, 5.0, thread=2),
        _call("cudaGraphLaunch", 11, 6.0),
        _call("cudaGraphLaunch", 12, 50.0),  # the program's own graph
        *(_kernel(10, 1.0), _kernel(11, 2.0), _kernel(12, 4.0)),
    ]
    assert graph_times(events, _NAMES) == {"a": 2.0, "b": 1.0}


def test_kernels_may_name_their_range() -> None:
    events = [
        _range("a", 0.0, 5),
        _range("b", 0.0, 6, thread=2),
        _kernel(1, 1.0, 6),
        _kernel(2, 2.0, 5),
    ]
    assert graph_times(events, _NAMES) == {"a": 2.0, "b": 1.0}


def test_what_the_trace_does_not_tell_is_not_known() -> None:
    # Another launch of a graph by the driver, of the program's own.
    events = [_range("a", 0.0, 0), _kernel(1, 1.0), _kernel(2, 2.0)]
    assert graph_times(events, _NAMES) == {}
    # Two threads at the same time.
    events = [_range("a", 0.0, 0), _range("b", 5.0, 0, thread=2), _kernel(1, 1.0), _kernel(2, 2.0)]
    assert graph_times(events, _NAMES) == {}
    # One of two replays is known.
    events = [_range("a", 0.0, 5), _range("a", 20.0, 6), _kernel(1, 1.0, 5)]
    assert graph_times(events, _NAMES) == {}
    assert graph_times([], _NAMES) == {}


def test_each_graph_has_its_own_row(
    monkeypatch: pytest.MonkeyPatch, told_to_the_engine: list[int]
) -> None:
    """Also where two graphs have the same name."""
    graphs: list[Any] = [FakeGraph(name="pygraph inference", nodes=n) for n in (1, 2)]
    partitions = [Partition(lambda args: args, INFO, Options()) for _ in graphs]
    for partition, graph in zip(partitions, graphs, strict=True):
        partition.entries[b"key"] = Entry(State.CAPTURED, graph=graph)
    observation = Observation(partitions=list(partitions))
    with measure._own_names(observation) as named:
        assert [graph.name for graph in graphs] == list(named)
    assert [graph.name for graph in graphs] == ["pygraph inference"] * 2
    rows = measure.graph_rows(observation, {id(graphs[1]): 12.5})
    assert {row.nodes: row.gpu_us for row in rows} == {1: None, 2: 12.5}
