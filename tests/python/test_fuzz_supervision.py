"""The fuzzer's worker processes: crashes and hangs are found, told apart and survived."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz import run as fuzz
from tests.fuzz.generate import generate
from tests.fuzz.program import UNCAPTURED
from tests.fuzz.supervise import Worker

from .fuzz_seeds import three_that_run


@pytest.fixture(scope="module")
def seed() -> int:
    return three_that_run()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    yield tmp_path


def _run(folder: Path, **changed: object) -> dict[str, object]:
    given = {
        **{"count": 3, "seconds": 300, "reduce_seconds": 0, "level": "partition", "mode": ""},
        **{"workers": 1, "device": "cpu", "folder": str(folder), "fault": ""},
    }
    return fuzz.run(argparse.Namespace(**{**given, **changed}))


def test_a_run_is_counted_and_can_be_continued(folder: Path, seed: int) -> None:
    report = _run(folder, seed=seed)
    assert report["programs"] == {"partition": 3, "compiled": 0}
    assert report["failures"] == []
    assert report["next_seed"] == seed + 3
    assert report["calls"] == sum(len(generate(seed + i, "partition").calls) for i in range(3))
    assert json.loads((folder / "report.json").read_text()) == report


def test_a_crash_belongs_to_its_seed(folder: Path, seed: int) -> None:
    report = _run(folder, fault="crashes", count=1, seed=seed)
    (failure,) = report["failures"]  # type: ignore[misc]
    assert (failure["seed"], failure["verdict"]) == (seed, "crashed")
    assert "SIGABRT" in failure["detail"][0]
    assert failure["detail"][-1] == "alone, too"
    assert report["worker_starts"] == 2


def test_a_hang_is_ended_and_the_worker_goes_on(folder: Path, seed: int) -> None:
    worker = Worker(0, "cpu", folder, "hangs")
    try:
        reply = worker.ask({"seed": seed, "level": "partition", "mode": ""}, 20)
        assert reply["verdict"] == "hung"
        assert any("faulty.py" in line for line in reply["detail"])  # where it hung
        assert worker.starts == 1
        assert worker.ask({"seed": seed, "level": "partition", "mode": ""}, 5)["verdict"] == "hung"
        assert worker.starts == 2
    finally:
        worker.stop()


def test_a_failure_is_reduced_and_written_out(folder: Path, seed: int) -> None:
    report = _run(folder, fault="raises", count=1, seed=seed, reduce_seconds=60)
    (failure,) = report["failures"]  # type: ignore[misc]
    before, after = failure["reduced"]
    assert after < before
    assert f"def test_seed_{seed}" in Path(failure["file"]).read_text()


class _Answers:
    """A worker that gives prepared replies."""

    def __init__(self, *replies: dict[str, object]) -> None:
        self._replies = list(replies)
        self.requests: list[dict[str, object]] = []

    def ask(self, request: dict[str, object], seconds: float, until: float) -> dict[str, object]:
        self.requests.append(request)
        return self._replies.pop(0)


@pytest.mark.parametrize("failure", ["crashed", "hung"])
@pytest.mark.parametrize(
    ("series", "alone", "verdict"),
    [
        (UNCAPTURED, "crashed", "{} uncaptured"),
        (UNCAPTURED, "equal", "{}"),  # what PyGraph did before may be the cause
        ("graphed", "crashed", "{}"),
        ("graphed", "equal", "{}"),
    ],
)
def test_a_failure_is_pytorchs_own_only_where_pygraph_was_never_used(
    failure: str, series: str, alone: str, verdict: str
) -> None:
    worker = _Answers(
        {"verdict": failure, "detail": [], "series": series},
        {"verdict": alone, "detail": []},
    )
    campaign = fuzz.Campaign(1, 1, 60, "partition")
    fuzz._work(campaign, worker)  # type: ignore[arg-type]
    assert ("uncaptured_runs" in worker.requests[1]) == (series == UNCAPTURED)
    wanted = verdict.format(failure)
    assert dict(campaign.verdicts["partition"]) == {wanted: 1}
    assert len(campaign.failures) == ("uncaptured" not in wanted)


def test_the_worker_tells_in_which_series_a_program_hangs(folder: Path, seed: int) -> None:
    worker = Worker(0, "cpu", folder, "hangs")
    request = {"seed": seed, "level": "partition", "mode": ""}
    try:
        assert worker.ask(request, 20)["series"] == "graphed"
        assert worker.ask({**request, "uncaptured_runs": 2}, 60)["verdict"] == "equal"
    finally:
        worker.stop()
