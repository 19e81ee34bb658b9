"""The report of programs that run on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import pygraph
from pygraph import cli

from .support import randn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        self.table = torch.arange(64)

    def forward(self, x: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) / temperature + self.table.to(x.device)).softmax(-1)


def test_a_program_that_fits_in_one_graph() -> None:
    with torch.no_grad():
        report = pygraph.explain(Model().cuda(), randn(8, 64), torch.tensor(2.0))
    assert not report.estimated
    assert [share.unit for share in report.shares] == ["kernels", "us"]
    assert report.shares[0].fraction == 1.0
    (row,) = report.graphs
    assert row.state == "captured"
    assert row.nodes == report.shares[0].in_graphs
    assert {note.transform for note in report.transformations} == {"cpu_scalars", "cpu_tensors"}
    assert all("test_explain.py" in note.where for note in report.transformations)
    assert report.timing is not None
    assert {part.kind for part in report.strip} == {"graph"}


def test_generated_kernels_have_operators_and_lines() -> None:
    with torch.no_grad():
        report = pygraph.explain(Model().cuda(), randn(8, 64), torch.tensor(2.0))
    generated = [row for row in report.kernels if row.name.startswith("triton_")]
    assert generated
    assert all(row.operators for row in generated), report.kernels
    assert all("test_explain.py:" in line for row in generated for line in row.where)
    assert any(row.where for row in generated)
    assert sum(row.count for row in report.kernels) == report.shares[0].total
    assert sum(row.in_graphs for row in report.kernels) == report.shares[0].in_graphs


def test_training_includes_the_backward_and_leaves_gradients_alone() -> None:
    model = Model().cuda()
    report = pygraph.explain(model, randn(8, 64), torch.tensor(2.0))
    assert {row.name for row in report.graphs if row.state == "captured"} >= {"forward", "backward"}
    assert all(p.grad is None for p in model.parameters())


def test_cuts_and_refusals_are_reported() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        print("a graph break")
        return x.sin(), (x > 0).nonzero()

    with torch.no_grad():
        report = pygraph.explain(function, randn(64, 64))
    kinds = {cut.kind for cut in report.cuts}
    assert "graph break" in kinds
    assert all(cut.reason for cut in report.cuts)
    assert 0 < report.shares[0].fraction < 1


def test_the_command_explains_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "def main():  # the model is gone when the report is written\n"
        "    model = torch.compile(torch.nn.Linear(64, 64).cuda())\n"
        "    with torch.no_grad():\n"
        "        for _ in range(int(sys.argv[1])):\n"
        "            model(torch.randn(8, 64, device='cuda'))\n"
        "main()\n"
    )
    compile_, argv = torch.compile, sys.argv
    try:
        assert cli.main(["explain", str(script), "5"]) == 0
    finally:
        torch.compile, sys.argv = compile_, argv
    assert "captured" in capsys.readouterr().out
