"""The line that ``python -m pygraph --summary`` prints at the end."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pygraph import observations, runtime
from pygraph.options import Options
from pygraph.partition.partition import Partition
from pygraph.partition.signature import Entry, State
from pygraph.report import summary
from pygraph.report.stats import GraphStats
from pygraph.select.trial import REPLAYED, UNCAPTURED, Timing

from .fake_engine import FakeGraph
from .stand_ins import INFO


def _timing(period: float) -> Timing:
    return Timing(host=period, device=period / 2, latency=period, noise=0.0, memory=0)


def _row(state: str, **values: Any) -> GraphStats:
    return GraphStats(name="inference", device=0, state=state, reason="", **values)


_TIMED = {UNCAPTURED: _timing(5e-3), REPLAYED: _timing(1e-3)}


def test_kernels_and_saved_time_are_what_was_counted_and_measured() -> None:
    row = _row("captured", nodes=30, replays=1000, timings=_TIMED)
    assert summary.summarize([row], outside=10, unknown=0) == (
        "1 graphs in use, 1,000 replays; 75.0% of the kernels in graphs; "
        "time saved, by the selection's measurements: 4 s"
    )


def test_what_is_not_known_is_not_said() -> None:
    untimed = _row("captured", nodes=30, replays=1000)
    line = summary.summarize([untimed], outside=0, unknown=2)
    assert "those outside not known (2 programs cached)" in line and "%" not in line
    assert line.endswith("time saved: not measured")
    both = [untimed, _row("captured", nodes=10, replays=10, timings=_TIMED)]
    assert summary.summarize(both, 0, 0).endswith("0.04 s, in 1 of 2 graphs")


def test_functions_that_run_uncaptured_make_the_share_a_bound() -> None:
    rows = [_row("captured", nodes=3), _row("refused"), _row("not selected"), _row("uncaptured")]
    line = summary.summarize(rows, outside=1, unknown=0)
    assert "at most 75.0%" in line and "1 not selected, 1 refused" in line


@pytest.fixture
def tally(monkeypatch: pytest.MonkeyPatch) -> summary.Tally:
    monkeypatch.setattr(summary, "_tally", None)
    monkeypatch.setattr(observations, "tally", None)
    summary.begin()
    tally = observations.tally
    assert isinstance(tally, summary.Tally)
    summary.begin()  # at each call of torch.compile
    assert observations.tally is tally
    return tally


def test_graphs_count_after_their_program_has_ended(
    tally: summary.Tally, told_to_the_engine: list[int]
) -> None:
    partition = Partition(lambda args: args, INFO, Options())
    graph: Any = FakeGraph(replays=7)
    partition.entries[b"key"] = Entry(State.CAPTURED, graph=graph)
    assert [row.replays for row in tally.rows()] == [7]
    del partition
    gc.collect()
    assert [row.replays for row in tally.rows()] == [7]
    assert runtime.members(tally._alive) == []


def test_a_reset_frees_the_graphs_that_were_counted(
    tally: summary.Tally, told_to_the_engine: list[int]
) -> None:
    partition = Partition(lambda args: args, INFO, Options())
    partition.entries[b"key"] = Entry()
    partition.reset()
    assert tally.rows() == []


def test_counting_keeps_no_tensors_of_the_program(
    tally: summary.Tally, told_to_the_engine: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter may refer to the step that leaves its gradient: by a hook, for example."""
    monkeypatch.setattr(runtime.engine(), "leave_gradients", lambda *_: None, raising=False)
    parameter = torch.zeros(1)
    info = dataclasses.replace(INFO, gradients=([parameter], 0))
    assert info == INFO and hash(info) == hash(INFO)
    partition = Partition(lambda args: args, info, Options())
    parameter.step = partition  # type: ignore[attr-defined]
    is_alive = weakref.ref(parameter)
    del parameter, info, partition
    gc.collect()
    assert is_alive() is None and runtime.members(tally._alive) == []


def test_operations_outside_of_graphs_are_counted(tally: summary.Tally) -> None:
    traced = make_fx(lambda x: x.sin().nonzero(), tracing_mode="fake")(torch.ones(3))
    tally.note_graph(traced.graph)  # on the CPU, so none on the GPU
    assert tally.outside == [0]


def test_without_a_call_of_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "_tally", None)
    assert summary.line() == "torch.compile was not called with PyGraph"
