"""A run of the fuzzer ends when its time is over, or when it is told to, and leaves its report."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import campaign as campaigns
from tests.fuzz import run as fuzz
from tests.fuzz.supervise import UNFINISHED, Worker

from .fuzz_seeds import three_that_run

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(_ROOT)
    yield tmp_path


def _arguments(folder: Path, **changed: object) -> argparse.Namespace:
    given = {
        **{"seed": 1, "count": 100, "seconds": 1.0, "reduce_seconds": 0, "level": "partition"},
        **{"mode": "", "workers": 2, "device": "cpu", "folder": str(folder), "fault": ""},
    }
    return argparse.Namespace(**{**given, **changed})


class _Stuck:
    """A worker that answers once, if it has a reply, and then neither answers nor minds the time."""

    starts = 1
    is_running = True

    def __init__(self, *replies: dict[str, Any]) -> None:
        self._replies = list(replies)

    def ask(self, request: object, seconds: float, until: float) -> dict[str, Any]:
        if self._replies:
            return self._replies.pop(0)
        time.sleep(60)
        raise AssertionError("left alone, but not for so long")

    def shut(self) -> None: ...

    def stop(self, patience: float) -> None: ...


def _run_with(
    monkeypatch: pytest.MonkeyPatch, worker: Callable[[], _Stuck], args: argparse.Namespace
) -> tuple[dict[str, Any], float]:
    """The report, and the seconds."""
    monkeypatch.setattr(fuzz, "Worker", lambda *args: worker())
    monkeypatch.setattr(campaigns, "_GRACE", 0.2)
    monkeypatch.setattr(fuzz, "_LATE_SECONDS", 0.2)
    begin = time.monotonic()
    return fuzz.run(args), time.monotonic() - begin


def test_a_run_ends_whatever_its_workers_do(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    report, seconds = _run_with(monkeypatch, _Stuck, _arguments(folder, seconds=0.3))
    assert seconds < 5
    assert (report["failures"], report["next_seed"]) == ([], 1)  # they are not done, and not failures
    assert json.loads((folder / "report.json").read_text()) == report


def test_a_failure_is_written_out_where_there_is_no_time_to_reduce_it(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    wrong = {"verdict": "wrong", "detail": ["call 0: other"]}
    args = _arguments(folder, count=1, workers=1, reduce_seconds=0.3)
    report, seconds = _run_with(monkeypatch, lambda: _Stuck(dict(wrong)), args)
    assert seconds < 5
    (failure,) = report["failures"]
    assert "def test_seed_1" in Path(failure["file"]).read_text()
    assert json.loads((folder / "report.json").read_text())["failures"] == [failure]


def test_a_report_is_there_while_the_run_goes_on(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Each call of the worker sees that the one before was reported."""
    monkeypatch.setattr(fuzz, "_REPORT_SECONDS", 0.02)
    seen: list[int] = []

    class Watching(_Stuck):
        def ask(self, request: object, seconds: float, until: float) -> dict[str, Any]:
            time.sleep(0.5)
            seen.append(json.loads((folder / "report.json").read_text())["programs"]["partition"])
            return {"verdict": "equal", "detail": []}

    _run_with(monkeypatch, Watching, _arguments(folder, count=3, workers=1, seconds=30))
    assert seen == [0, 1, 2]


def test_a_program_that_runs_when_the_time_is_over_is_unfinished(folder: Path) -> None:
    worker = Worker(0, "cpu", folder, "hangs")
    request = {"seed": three_that_run(), "level": "partition", "mode": ""}
    try:
        begin = time.monotonic()
        assert worker.ask(request, 60, begin + 0.5)["verdict"] == UNFINISHED  # as it starts
        assert worker.ask(request, 60, time.monotonic() + 8)["verdict"] == UNFINISHED
        assert time.monotonic() - begin < 30
        assert worker.starts == 2 and not worker.is_running
    finally:
        worker.stop()


def test_a_run_that_is_terminated_leaves_its_report_and_no_workers(folder: Path) -> None:
    seed = three_that_run()
    command = [sys.executable, "-m", "tests.fuzz.run", "--device", "cpu", "--workers", "1"]
    command += [
        "--fault",
        "hangs",
        "--seed",
        str(seed),
        "--level",
        "partition",
        "--folder",
        str(folder),
    ]
    process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True)
    report = folder / "report.json"
    try:
        while not report.exists() or not _children(process.pid):
            assert process.poll() is None
            time.sleep(0.1)
        time.sleep(5)  # the worker hangs or still starts: it is there in any case
        (worker,) = _children(process.pid)
        report.unlink()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=15) == 128 + signal.SIGTERM
        assert json.loads(report.read_text())["next_seed"] == seed
        assert not Path(f"/proc/{worker}").exists()
    finally:
        process.kill()


def _children(process: int) -> list[int]:
    lists = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for each in lists for child in each.read_text().split()]
