"""What reports say of graphed callables: rows, reasons with lines, and nothing that is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pygraph
from pygraph.observations import observing
from pygraph.partition.signature import Entry
from pygraph.report import measure
from pygraph.report.remedies import remedy_for, where_in
from pygraph.report.script import report_on
from pygraph.report.stats import graph_row
from pygraph.report.wording import GRAPH_COLUMNS, graph_cells

from .graphed_programs import Training, adamw, batches, replays, sgd


@pytest.fixture
def explained(partitions: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`explain` measures on the CPU, where nothing is decided and no kernel is traced."""
    monkeypatch.setattr(measure, "_LONGEST_WARM_UP", 8)
    monkeypatch.setattr(measure, "trace_call", lambda call: [call(), []][1])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    return partitions


@pytest.mark.parametrize("calls_before", [0, 3])
def test_explain_trains_nothing(explained: Any, calls_before: int) -> None:
    at, other = Training(adamw), Training(adamw)
    steps = [pygraph.graph(at.step), pygraph.graph(other.step)]
    for x, y in batches(calls_before):
        for step in steps:
            step(x, y)
    known = replays(explained)
    x, y = batches(1)[0]
    torch.manual_seed(3)
    random = torch.get_rng_state()
    report = pygraph.explain(steps[0], x, y)
    assert replays(explained) > known and report.program == "step" and report.timing is not None
    assert torch.equal(torch.get_rng_state(), random)
    assert len(at.state()) == len(other.state())
    for x, y in batches(6):
        for step in steps:
            step(x, y)
    assert all(torch.equal(a, b) for a, b in zip(at.state(), other.state(), strict=True))


def test_a_report_times_calls_before_the_profile(
    explained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays are slow for a second after it."""
    order: list[str] = []

    def note(name: str) -> None:
        original = getattr(measure, name)
        monkeypatch.setattr(measure, name, lambda call: [order.append(name), original(call)][1])

    note("trace_call")
    note("_time")
    at = Training(sgd)
    pygraph.explain(pygraph.graph(at.step), *batches(1)[0])
    assert order == ["_time", "trace_call"]


def test_a_step_without_a_graph_has_its_reason_line_and_remedy(explained: Any) -> None:
    at = Training(sgd)
    counts: list[int] = []

    @pygraph.graph
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        counts.append(1)
        return at.step(x, y)

    report = pygraph.explain(step, *batches(1)[0])
    (cut,) = report.cuts
    assert "each call changes counts" in cut.reason and cut.kind == "refusal"
    assert counts == []
    assert "step stays uncaptured" in str(report)


def test_what_a_callable_changes_is_put_back_after_an_error(explained: Any) -> None:
    at = Training(adamw)
    before = at.state()
    calls = 0

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        at.step(x, y)
        if calls == 3:
            raise KeyError("the program's own")

    with pytest.raises(KeyError, match="the program's own"):
        pygraph.explain(pygraph.graph(step), *batches(1)[0])
    assert calls == 0
    assert all(torch.equal(a, b) for a, b in zip(at.state(), before, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_step_is_not_called() -> None:
    @pygraph.graph
    def step() -> None:
        raise AssertionError

    report = pygraph.explain(step)
    assert report.estimated and "there is no CUDA GPU" in report.cuts[0].reason
    assert "step on no GPU" in str(report)


def test_a_row_tells_which_rates_are_followed(partitions: Any) -> None:
    at = Training(adamw)
    step = pygraph.graph(at.step)
    for x, y in batches(4):
        step(x, y)
    (partition,) = partitions.all
    row = graph_row(partition.info, Entry())
    assert row.followed == ("AdamW.param_groups[0]['lr']",)
    cells = dict(zip(GRAPH_COLUMNS, graph_cells(row), strict=True))
    assert cells["follows"] == row.followed[0] and cells["since audit"] == "-"


@pytest.mark.parametrize(
    ("reason", "where", "remedy"),
    [
        ("it waits for the GPU: aten::item (train.py:41)", "train.py:41", "return the tensor"),
        ("momentum differs from call to call", "", "pass it as a tensor on the GPU"),
        ("each call changes n, which a replay would not; move that out of the callable", "", ""),
        ("operator aten::mm reads a tensor on the CPU; move it to the GPU", "", ""),
        ("another reason (with brackets)", "", ""),
    ],
)
def test_reasons_have_lines_and_remedies(reason: str, where: str, remedy: str) -> None:
    entry = Entry()
    entry.refuse(reason, 0)
    assert where_in(reason) == where
    assert remedy_for(reason).startswith(remedy) and bool(remedy_for(reason)) == bool(remedy)


def test_the_report_of_a_script_has_its_steps(partitions: Any) -> None:
    counts: list[int] = []

    def counting(x: torch.Tensor) -> torch.Tensor:
        counts.append(1)
        return x + 1

    with observing() as observation, torch.no_grad():
        step = pygraph.graph(counting)
        for _ in range(9):
            step(torch.ones(2))
        del step
    report = report_on("train.py", observation, {})
    assert [(row.name, row.state) for row in report.graphs] == [("counting", "refused")]
    assert any("each call changes counts" in cut.reason for cut in report.cuts)
