"""The long training of tests/soak: what it counts as passed, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import pygraph
from tests.soak import training


def report(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    file = folder / "training.json"
    code = training.main(["--device", "cpu", "--output", str(file), *arguments])
    return code, json.loads(file.read_text())


def test_steps_that_need_no_graph_pass(tmp_path: Path) -> None:
    code, rows = report(tmp_path, "--only", "Adagrad", "--other-steps", "6")
    (row,) = rows
    assert code == 0 and row["passed"] and row["steps"] == 6
    assert row["replays"] == 0 and row["differs"] == row["uncaptured_differs_from_itself"] == ""


def test_too_few_replays_do_not_pass(tmp_path: Path) -> None:
    code, rows = report(tmp_path, "--only", "AdamW", "--steps", "30", "--other-steps", "30")
    assert code == 1 and not any(row["passed"] for row in rows)
    assert [row["steps"] for row in rows] == [30, 30] and not any(row["differs"] for row in rows)


@pytest.mark.parametrize("wrong", ["a loss", "a parameter"])
def test_results_that_differ_do_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    def graph(step: Any, **options: Any) -> Any:
        calls = 0

        def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            loss: torch.Tensor = step(x, y)
            if calls == 5 and wrong == "a loss":
                return loss + 1e-6
            if calls == 6 and wrong == "a parameter":
                with torch.no_grad():
                    next(iter(step.__self__.model.parameters()))[0, 0] += 1e-3
            return loss

        return run

    monkeypatch.setattr(pygraph, "graph", graph)
    code, rows = report(tmp_path, "--only", "Adagrad", "--other-steps", "6")
    (row,) = rows
    assert code == 1 and not row["passed"]
    assert (
        row["differs"]
        == {"a loss": "the loss of step 4", "a parameter": "tensor 0 of the state"}[wrong]
    )


def test_a_program_that_differs_from_itself_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = training.Training.step

    def nondeterministic(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch.seed()
        return step(self, x, y)

    monkeypatch.setattr(training.Training, "step", nondeterministic)
    _, rows = report(tmp_path, "--only", "Adagrad", "--other-steps", "4")
    assert rows[0]["uncaptured_differs_from_itself"] == "the loss of step 0"
