"""Signatures whose graph cannot serve their calls: recorded anew."""

from __future__ import annotations

import pytest

from pygraph import runtime
from pygraph.options import Options
from pygraph.partition import pipeline
from pygraph.partition.attempt import Attempt
from pygraph.partition.call import Call
from pygraph.partition.partition import Partition
from pygraph.partition.signature import State

from .fake_engine import FakeGraph
from .stand_ins import INFO, call


@pytest.mark.parametrize(("replays_between", "calls"), [(0, 8), (1, 15), (2, None)])
def test_calls_that_keep_what_a_graph_uses_are_uncaptured_and_get_another_one_if_they_go_on(
    told_to_the_engine: list[int],
    monkeypatch: pytest.MonkeyPatch,
    replays_between: int,
    calls: int | None,
) -> None:
    taken: list[object] = []
    removed: list[object] = []

    def attempt(call: Call) -> Attempt:
        taken.append(call.may_donate)
        return Attempt(list(call.args), FakeGraph(donated=[0], replays=1000))

    monkeypatch.setattr(pipeline, "attempt", attempt)
    engine = runtime.engine()
    monkeypatch.setattr(engine, "given_away", lambda args: [], raising=False)
    monkeypatch.setattr(
        engine, "remove_graph", lambda function, graph: removed.append(graph), raising=False
    )
    partition = Partition(lambda args: list(args), INFO, Options(select="always"))
    for _ in range(2):
        entry = call(partition, None)
    graph = entry.graph
    assert isinstance(graph, FakeGraph)
    fresh, count = entry, 0
    while fresh is entry and count < 100:
        graph.replays += replays_between
        fresh = call(partition, None)
        count += 1
    if calls is None:
        assert not removed
        return
    assert count == calls
    assert removed == [graph]
    assert (fresh.state, fresh.graph) == (State.UNCAPTURED, None)
    call(partition, None)
    assert taken == [True, False]  # the new one leaves that memory alone
