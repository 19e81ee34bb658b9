"""The row of a signature, which ``pygraph.stats()`` and reports show."""

from __future__ import annotations

import dataclasses
from typing import Any

from pygraph.partition.signature import Entry, State
from pygraph.report.stats import GraphStats, graph_row
from pygraph.report.wording import GRAPH_COLUMNS, graph_cells
from pygraph.select.trial import REPLAYED, Decision, Timing

from .fake_engine import FakeGraph
from .stand_ins import INFO

# Of a graph, under the same names as the engine's.
_OF_THE_GRAPH = [
    *("nodes", "inputs", "outputs", "relocations", "symbols", "lanes", "replays", "nodes_touched"),
    *("calls_elsewhere", "workspace_bytes", "block_bytes"),
]


def _entry(graph: FakeGraph | None) -> Entry:
    entry = Entry(State.CAPTURED if graph else State.NOT_SELECTED, graph=graph, reason="")
    entry.recording.capture_seconds, entry.recording.bytes_not_copied = 0.5, 77
    timing = Timing(1e-3, 2e-3, 3e-3, 0.0, 4)
    entry.selection.decision = Decision(REPLAYED, {REPLAYED: timing})
    entry.audits.made, entry.audits.good_at = 3, 5
    return entry


def test_a_row_has_what_the_graph_says() -> None:
    numbers: dict[str, Any] = {name: 10 + i for i, name in enumerate(_OF_THE_GRAPH)}
    graph = FakeGraph(**numbers)
    row = graph_row(INFO, _entry(graph))
    assert [getattr(row, name) for name in _OF_THE_GRAPH] == list(range(10, 10 + len(_OF_THE_GRAPH)))
    assert (row.name, row.state, row.capture_seconds, row.bytes_not_copied) == (
        *("forward", "captured"),
        *(0.5, 77),
    )
    assert (row.selected, row.audits, row.replays_since_audit) == (REPLAYED, 3, graph.replays - 5)
    assert "500 ms" in graph_cells(row)


def test_a_row_without_a_graph_shows_no_numbers_of_one() -> None:
    row = graph_row(INFO, _entry(None))
    assert row.inputs == INFO.argument_count
    assert all(getattr(row, name) == 0 for name in _OF_THE_GRAPH if name != "inputs")
    cells = dict(zip(GRAPH_COLUMNS, graph_cells(row), strict=True))
    unknown = ("relocations", "copies avoided per call", "workspace", "capture", "replays")
    assert all(cells[column] == "-" for column in unknown)


def test_a_graph_that_failed_in_use_is_refused_with_its_reason() -> None:
    row = graph_row(INFO, _entry(FakeGraph(failure="its memory was freed")))
    assert (row.state, row.reason) == ("refused", "its memory was freed")


def test_every_field_is_documented() -> None:
    documented = GraphStats.__doc__ or ""
    for field in dataclasses.fields(GraphStats):
        if field.name not in ("device", "inputs", "outputs"):
            assert f"{field.name}" in documented, field.name
