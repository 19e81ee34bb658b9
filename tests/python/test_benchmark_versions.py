"""Two versions of PyGraph side by side: what is run, and what the table says."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import versions
from benchmarks.lanes import Outcome


def _row(us: float, host_us: float, backend: str = "pygraph") -> str:
    row = {"backend": backend, "us": us, "us_spread": 0.01, "latency_us": us, "host_us": host_us}
    return "ROW " + json.dumps({**row, "peak_mib": 100.0})


def test_each_version_runs_in_its_own_checkout_and_ratios_are_to_the_other_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: dict[str, Sequence[str]] = {}

    def run_lanes(
        commands: Mapping[str, Callable[[str], Sequence[str]]],
        gpus: Sequence[str],
        *,
        report: Callable[[str, Outcome], None],
        **_: Any,
    ) -> None:
        for key, command in commands.items():
            ran[key] = command("token")
            us = {"other": 100.0, "new": 102.0, "new, all patches": 99.0}[key.rsplit("@", 1)[1]]
            report(key, Outcome(f"noise\n{_row(us, us / 2)}\n{_row(1, 1, 'inductor')}\n", 0))

    monkeypatch.setattr(versions, "run_lanes", run_lanes)
    out = tmp_path / "versions.json"
    versions.main([str(tmp_path), "--only", "bert/inference", "--out", str(out)])
    assert list(ran) == [
        "bert/inference@other",
        "bert/inference@new",
        "bert/inference@new, all patches",
    ]
    assert f"PYTHONPATH={tmp_path / 'python'}:{tmp_path}" in ran["bert/inference@other"]
    assert "PYGRAPH_PATCHES=all" in ran["bert/inference@new, all patches"]
    assert all(command[-1] == "token" for command in ran.values())
    printed = capsys.readouterr().out
    assert "bert/inference | new | 102.0 | 0.010 | 1.020 | 1.020 | 1.020 | 1.000" in printed
    assert "new, all patches: geometric mean 0.990, worst 0.990 of 1" in printed
    assert json.loads(out.read_text())["bert/inference"]["other"]["us"] == 100.0


def test_a_version_that_failed_has_no_row_and_the_rest_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = json.loads(_row(5, 2)[4:])
    text = versions.table({"a": {"new": row}, "b": {"other": row, "new": row}})
    assert "a | new | 5.0 | 0.010\n" in text
    assert "new: geometric mean 1.000, worst 1.000 of 1" in text
    assert "all patches:" not in text
