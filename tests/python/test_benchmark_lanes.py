"""Workers of the benchmarks: who may compile, tune and measure when, and whose output is whose."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch._inductor.runtime.benchmarking import benchmarker

from benchmarks import lanes, turn
from benchmarks.turn import Turn


def test_one_worker_at_a_time_measures_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (Turn(str(tmp_path / name)) for name in ("first", "second"))
    seen: list[str] = []
    waits = threading.Event()
    flock = turn.fcntl.flock

    def other() -> None:
        monkeypatch.setattr(turn.fcntl, "flock", lambda *args: (waits.set(), flock(*args)))
        with second.alone():
            seen.append("second")

    thread = threading.Thread(target=other)
    with first.alone(), first.alone():
        thread.start()
        waits.wait()
        seen.append("first")
    thread.join()
    assert seen == ["first", "second"]
    assert second.waited > 0


def test_a_worker_tunes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Turn(str(tmp_path / "worker"))
    depths: list[int] = []
    monkeypatch.setattr(
        type(benchmarker),
        "benchmark_gpu",
        lambda self, function, **_: depths.append(turn._depth) or 1.0,
    )
    with turn.tunes_alone():
        assert benchmarker.benchmark(lambda: None, device="cuda") == 1.0
    benchmarker.benchmark(lambda: None, device="cuda")
    assert depths == [1, 0]


_WORKER = """
import pathlib, sys, time
from benchmarks.turn import Turn
key, token, folder = sys.argv[1:]
log = pathlib.Path(folder) / "log"
def note(what):
    with log.open("a") as file:
        file.write(f"{key} {what}\\n")
note("compiles")
time.sleep(0.3)
if key == "broken":
    sys.exit(3)
if key == "stuck":
    time.sleep(600)
note("compiled")
Turn(token).wait_until_all_have_compiled()
note("starts")
time.sleep(0.3)
note("ends")
print("ROW", key)
"""


def test_what_has_compiled_when_the_time_is_over_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready: list[Path] = []  # of the first one

    def monotonic() -> float:
        return 1000.0 if ready and ready[0].exists() else 0.0

    monkeypatch.setattr(lanes, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))

    def command(key: str) -> Callable[[str], list[str]]:
        def start(token: str) -> list[str]:
            if key == "a":
                ready.append(Path(token).with_suffix(".ready"))
            return [sys.executable, "-c", _WORKER, key, token, str(tmp_path)]

        return start

    outcomes: dict[str, lanes.Outcome] = {}
    lanes.run_lanes(
        {key: command(key) for key in ("a", "stuck", "later")},
        ["0", "1"],
        timeout=math.inf,
        at_a_time=1,
        report=outcomes.__setitem__,
        until=500.0,
    )
    assert {key: outcome.status for key, outcome in outcomes.items()} == {"a": 0, "stuck": None}


class _Clock:
    """Stands still until a last worker has compiled; then the time of the stuck one is up."""

    def __init__(self) -> None:
        self._last: Path | None = None
        self._calls: dict[int, int] = {}

    def last_is(self, token: str) -> None:
        self._last = Path(token).with_suffix(".ready")

    def stuck_starts(self) -> None:
        self._calls[threading.get_ident()] = 0  # in its lane

    def monotonic(self) -> float:
        lane = threading.get_ident()
        if lane not in self._calls:
            return 0.0
        self._calls[lane] += 1  # the first one is the start
        is_over = self._calls[lane] > 1 and self._last is not None and self._last.exists()
        return 1000.0 if is_over else 0.0


def test_nothing_is_timed_while_something_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Clock()
    monkeypatch.setattr(lanes, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=time.sleep))

    def command(key: str) -> Callable[[str], list[str]]:
        def start(token: str) -> list[str]:
            if key == "stuck":
                clock.stuck_starts()
            elif key == "d":
                clock.last_is(token)
            return [sys.executable, "-c", _WORKER, key, token, str(tmp_path)]

        return start

    outcomes: dict[str, lanes.Outcome] = {}
    keys = ["a", "b", "broken", "c", "stuck", "d"]
    lanes.run_lanes(
        {key: command(key) for key in keys},
        ["0", "1"],
        timeout=8,
        at_a_time=1,
        report=outcomes.__setitem__,
    )
    assert set(outcomes) == set(keys)
    assert [outcomes[key].status for key in keys] == [0, 0, 3, 0, None, 0]
    assert outcomes["d"].output == "ROW d\n"
    events = (tmp_path / "log").read_text().splitlines()
    first = next(i for i, event in enumerate(events) if event.endswith("starts"))
    assert not any("compile" in event for event in events[first:])
    assert [event.split()[1] for event in events[first:]] == ["starts", "ends"] * 4


def test_a_job_is_reported_when_it_ends(tmp_path: Path) -> None:
    """So that what was measured is kept if the run is stopped."""

    def command(key: str) -> Callable[[str], list[str]]:
        return lambda token: [sys.executable, "-c", _WORKER, key, token, str(tmp_path)]

    seen: list[str] = []

    def report(key: str, outcome: lanes.Outcome) -> None:
        seen.append((tmp_path / "log").read_text())

    lanes.run_lanes(
        {"a": command("a"), "b": command("b")}, ["0"], timeout=600, at_a_time=1, report=report
    )
    assert [log.count("ends") for log in seen] == [1, 2]
