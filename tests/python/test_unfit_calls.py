"""Signatures whose graph cannot serve their calls: recorded anew, with copied inputs if need be."""

from __future__ import annotations

import dataclasses

import pytest

from pygraph import partition as partition_module
from pygraph import recording_policy, runtime
from pygraph.capture import Attempt, SideEffects
from pygraph.copied_inputs import CopiedInputs
from pygraph.entry import Form, State
from pygraph.options import Options
from pygraph.partition import Partition

from .stand_ins import INFO, Graph, call


class _Taking(Graph):
    """A graph that uses the memory of its first argument."""

    donated = (0,)
    replays = 1000


@pytest.mark.parametrize(("replays_between", "calls"), [(0, 8), (1, 15), (2, None)])
def test_calls_that_keep_what_a_graph_uses_are_uncaptured_and_get_another_one_if_they_go_on(
    calls_per_look: list[int],
    monkeypatch: pytest.MonkeyPatch,
    replays_between: int,
    calls: int | None,
) -> None:
    taken: list[object] = []
    removed: list[object] = []

    def attempt(function: object, uncaptured: object, args: list[int], *rest: object) -> Attempt:
        taken.append(rest[-3])
        return Attempt(list(args), _Taking())

    monkeypatch.setattr(partition_module.capture, "attempt", attempt)
    engine = runtime.engine()
    monkeypatch.setattr(engine, "given_away", lambda args: [], raising=False)
    monkeypatch.setattr(
        engine, "remove_graph", lambda function, graph: removed.append(graph), raising=False
    )
    partition = Partition(lambda args: list(args), INFO, Options(select="always"))
    for _ in range(2):
        entry = call(partition, None)
    graph = entry.graph
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


class _AtFixedAddresses(Graph):
    """A graph with copied inputs, of which the engine says whether it can serve a call."""

    copied_bytes = 8
    fits = True

    def matches(self, args: list[object]) -> bool:
        return self.fits


@pytest.fixture
def forms(calls_per_look: list[int], monkeypatch: pytest.MonkeyPatch) -> list[CopiedInputs | None]:
    """What was recorded: relocated forms fail, those with copied inputs are graphs."""
    forms: list[CopiedInputs | None] = []

    def attempt(function: object, uncaptured: object, args: list[object], *rest: object) -> Attempt:
        copied = rest[-1]
        assert copied is None or isinstance(copied, CopiedInputs)
        forms.append(copied)
        if copied is None:
            return Attempt(list(args), failure="an address is hidden", is_unmovable=True)
        return Attempt(list(args), _AtFixedAddresses())

    monkeypatch.setattr(partition_module.capture, "attempt", attempt)
    monkeypatch.setattr(runtime.engine(), "remove_graph", lambda *of: None, raising=False)
    return forms


def _unmovable_partition() -> Partition:
    info = dataclasses.replace(INFO, static=frozenset({0, 1, 2}), mutated=frozenset({1, 3}))
    partition = Partition(lambda args: list(args), info, Options(select="always"))
    partition._effects = SideEffects(mutated=frozenset({1, 3}))
    return partition


def test_what_cannot_be_relocated_is_recorded_with_copied_inputs(
    forms: list[CopiedInputs | None],
) -> None:
    partition = _unmovable_partition()
    call(partition, None)
    entry = call(partition, None)
    assert (entry.state, entry.reason) == (State.UNCAPTURED, "an address is hidden")
    partition._policy.note_recording(3600.0)  # which further signatures would wait for
    partition._policy.note_recording(3600.0)
    call(partition, None)
    assert (entry.state, entry.form) == (State.CAPTURED, Form.COPIED)
    # What is to keep its address is not copied, if nobody writes to it.
    assert forms == [None, CopiedInputs(frozenset({0, 2}), frozenset({1, 3}))]


def test_what_fails_with_copied_inputs_too_is_refused_with_both_reasons(
    calls_per_look: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [("an address is hidden", True), ("no such luck", True)]

    def attempt(function: object, uncaptured: object, args: list[object], *rest: object) -> Attempt:
        failure, is_unmovable = failures.pop(0)
        return Attempt(list(args), failure=failure, is_unmovable=is_unmovable)

    monkeypatch.setattr(partition_module.capture, "attempt", attempt)
    partition = _unmovable_partition()
    for _ in range(5):
        entry = call(partition, None)
    assert entry.state is State.REFUSED
    assert entry.reason == "an address is hidden; with copied inputs, no such luck"
    assert failures == []


def test_other_failures_are_no_reason_to_copy(
    calls_per_look: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        partition_module.capture,
        "attempt",
        lambda f, u, args, *rest: Attempt(list(args), failure="a host callback"),
    )
    partition = _unmovable_partition()
    for _ in range(3):
        entry = call(partition, None)
    assert (entry.state, entry.form, entry.reason) == (
        State.REFUSED,
        Form.RELOCATED,
        "a host callback",
    )


def test_arguments_that_keep_moving_are_copied_as_well(
    forms: list[CopiedInputs | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_RECORDED_AT_ONCE", "_RECORDED_AT_ONCE_IF_DYNAMIC"):
        monkeypatch.setattr(recording_policy, name, 100)
    partition = _unmovable_partition()
    for _ in range(3):
        entry = call(partition, None)
    for _ in range(5):
        assert entry.graph is not None
        entry.graph.fits = False
        assert call(partition, None).state is (
            State.UNCAPTURED if entry.form is Form.COPIED else State.CAPTURED
        )
        entry = call(partition, None)
        assert (entry.state, entry.reason) == (State.CAPTURED, "an address is hidden")
    fixed = [copied.fixed for copied in forms if copied is not None]
    assert fixed == [frozenset({0, 2})] * 3 + [frozenset()]
