"""Fuzzes PyGraph: random programs in worker processes, graphed and not.

    python -m tests.fuzz.run --count 20000 --seconds 480 --seed 0

Writes report.json, and for each of the first failures a reduced test file, into --folder. A run is
continued with --seed set to the report's ``next_seed``. Ends with code 1 after a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from . import reproducer
from .generate import COMPILED_EVERY, generate
from .program import UNCAPTURED, Program, to_json
from .reduce import reduce, size_of
from .supervise import Worker

_FAILURES = ("wrong", "crashed", "hung", "leaked", "harness")
_REDUCED = 20  # failures that are reduced and written out
_PROGRAM_SECONDS = {"partition": 45.0, "compiled": 180.0}
_SHORT_SECONDS = 20.0  # of a program that hung before
_UNLIKELY = 100  # so many failures end the run: more tell nothing new
_UNCAPTURED_RUNS = 20  # of a program that failed without PyGraph
_REMEMBERED = 20  # programs that a worker ran before one that crashed


class Campaign:
    """Seeds to go, and what came of those that are done. Shared by one thread per worker."""

    def __init__(self, first: int, count: int, seconds: float, level: str, mode: str = "") -> None:
        self._next, self._end = first, first + count
        self._level = level
        self._mode = mode
        self._start = time.monotonic()
        self._deadline = self._start + seconds
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self.verdicts: dict[str, Counter[str]] = {"partition": Counter(), "compiled": Counter()}
        self.sums: Counter[str] = Counter()
        self.states: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []
        self.unjudged: list[int] = []

    def level_of(self, seed: int) -> str:
        return self._level or ("compiled" if seed % COMPILED_EVERY == 0 else "partition")

    def request(self, seed: int) -> dict[str, Any]:
        return {"seed": seed, "level": self.level_of(seed), "mode": self._mode}

    def program(self, seed: int) -> Program:
        return generate(seed, self.level_of(seed), self._mode)

    def take(self) -> int | None:
        """The next seed; None where the run is to end."""
        with self._lock:
            is_over = self._next >= self._end or time.monotonic() > self._deadline
            if is_over or len(self.failures) >= _UNLIKELY:
                return None
            self._next += 1
            self._open.add(self._next - 1)
            return self._next - 1

    def note(self, seed: int, reply: dict[str, Any]) -> None:
        verdict = reply["verdict"]
        if verdict in ("equal", "by chance") and reply.get("leaked"):
            verdict = "leaked"
            reply["detail"] = [f"{reply['leaked']} bytes stay allocated", *reply["detail"]]
        with self._lock:
            self._open.discard(seed)
            self.verdicts[self.level_of(seed)][verdict] += 1
            for name in ("calls", "raised", "replays"):
                self.sums[name] += reply.get(name, 0)
            self.sums["with replays"] += bool(reply.get("replays"))
            self.states.update(reply.get("states", {}))
            self.reasons.update({_kind_of(r): n for r, n in reply.get("reasons", {}).items()})
            if verdict == "unjudged":
                self.unjudged.append(seed)
            if verdict in _FAILURES:
                failure = {"seed": seed, "verdict": verdict, "detail": reply["detail"]}
                self.failures.append(failure | {"evidence": reply.get("evidence", [])})
                if len(self.failures) <= _REDUCED:
                    print(f"seed {seed} ({self.level_of(seed)}): {verdict}", flush=True)
                    print(
                        "".join(f"    {line[:220]}\n" for line in _ends(reply["detail"])),
                        end="",
                        flush=True,
                    )

    def report(self) -> dict[str, Any]:
        with self._lock:
            programs = {level: sum(counts.values()) for level, counts in self.verdicts.items()}
            return {
                "seconds": round(time.monotonic() - self._start, 1),
                "programs": programs,
                "verdicts": {level: dict(counts) for level, counts in self.verdicts.items()},
                **dict(self.sums),
                "graphs": dict(self.states),
                "refused": dict(self.reasons.most_common(30)),
                "unjudged": self.unjudged[:100],
                "failures": self.failures,
                "next_seed": min(self._open, default=self._next),
            }


def _ends(lines: list[str]) -> list[str]:
    return lines if len(lines) <= 5 else [lines[0], *lines[-4:]]


def _kind_of(reason: str) -> str:
    """Reasons without what differs from program to program."""
    return "".join("#" if c.isdigit() else c for c in reason)[:110]


def _work(campaign: Campaign, worker: Worker) -> None:
    is_first = True
    before: list[int] = []  # seeds that the worker's process has run
    while (seed := campaign.take()) is not None:
        level = campaign.level_of(seed)
        seconds = _PROGRAM_SECONDS[level] * (4 if is_first else 1)  # kernels are loaded, caches filled
        is_first = False
        reply = worker.ask(campaign.request(seed), seconds)
        if reply["verdict"] in ("crashed", "hung"):
            reply["detail"] += [
                f"in the series: {reply['series']}",
                f"the worker's programs before: {before[-_REMEMBERED:]}",
            ]
            _ask_again(campaign.request(seed), reply, worker, seconds)
            is_first = True
        elif reply.get("leaked"):  # or kept by a library from its first use on
            again = worker.ask(campaign.request(seed), seconds)
            reply["leaked"] = again.get("leaked", 0)
        before = [] if is_first else [*before[-_REMEMBERED:], seed]
        campaign.note(seed, reply)


def _ask_again(request: dict[str, Any], reply: dict[str, Any], worker: Worker, seconds: float) -> None:
    """What a program does alone that crashed or hung. It is PyTorch's own fault if that happened
    without PyGraph, and happens without it in a process that has not used PyGraph at all."""
    verdict = reply["verdict"]
    if reply["series"] == UNCAPTURED:
        alone = worker.ask({**request, "uncaptured_runs": _UNCAPTURED_RUNS}, 2 * seconds)
        if alone["verdict"] in ("crashed", "hung"):
            reply["verdict"] = f"{verdict} uncaptured"
    else:
        alone = worker.ask(request, seconds)
    same = "alone, too" if alone["verdict"] == verdict else f"alone: {alone['verdict']}"
    reply["detail"].append(same)


def _reduce_all(
    campaign: Campaign, workers: list[Worker], folder: Path, device: str, seconds: float
) -> None:
    left = list(campaign.failures[:_REDUCED])
    lock = threading.Lock()
    end = time.monotonic() + seconds

    def work(worker: Worker) -> None:
        while True:
            with lock:
                if not left:
                    return
                failure = left.pop(0)
            program = campaign.program(failure["seed"])
            remaining = min(seconds / 2, end - time.monotonic())
            if failure["verdict"] != "harness" and remaining > 0:
                before = size_of(program)
                program = _reduced(program, failure["verdict"], worker, remaining)
                failure["reduced"] = [before, size_of(program)]
            failure["file"] = str(
                reproducer.write(
                    folder / "failures", program, device, failure["verdict"], failure["detail"]
                )
            )

    _in_threads(work, workers)


def _reduced(program: Program, verdict: str, worker: Worker, seconds: float) -> Program:
    def fails(candidate: Program) -> bool:
        limit = _SHORT_SECONDS if verdict == "hung" else _PROGRAM_SECONDS[program.level]
        reply = worker.ask({"program": to_json(candidate)}, limit)
        found = reply["verdict"]
        return bool(reply.get("leaked")) if verdict == "leaked" else found == verdict

    return reduce(program, fails, seconds)


def _in_threads(work: Any, workers: list[Worker]) -> None:
    errors: list[BaseException] = []

    def guarded(worker: Worker) -> None:
        try:
            work(worker)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report, which is also written to the folder."""
    folder = Path(args.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("worker-*.log"):
        old.unlink()
    gpus = _gpus() if args.device == "cuda" else 1
    count = args.workers or (os.cpu_count() or 1)
    workers = [Worker(i, args.device, folder, args.fault, gpus) for i in range(count)]
    campaign = Campaign(args.seed, args.count, args.seconds, args.level, args.mode)
    try:
        _in_threads(lambda worker: _work(campaign, worker), workers)
        report = campaign.report()
        _write(folder, report)  # in case that the run is ended while it reduces
        if args.reduce_seconds > 0:
            _reduce_all(campaign, workers, folder, args.device, args.reduce_seconds)
            report["failures"] = campaign.failures
    finally:
        for worker in workers:
            worker.stop()
    report["worker_starts"] = sum(worker.starts for worker in workers)
    _write(folder, report)
    return report


def _write(folder: Path, report: dict[str, Any]) -> None:
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")


def _gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return 1  # the choice is the caller's
    import torch

    return max(1, torch.cuda.device_count())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--reduce-seconds", type=float, default=60)
    parser.add_argument("--level", choices=["", "partition", "compiled"], default="")
    parser.add_argument("--mode", choices=["", "plain", "streams", "thread", "concurrent"], default="")
    parser.add_argument("--workers", type=int, default=0, help="0: one per core")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", default="build/fuzz")
    parser.add_argument("--fault", default="", help='wrong graphs (faulty.py), or "none": no graphs')
    report = run(parser.parse_args())
    shown = {key: value for key, value in report.items() if key != "failures"}
    print(json.dumps(shown, indent=1))
    failures = report["failures"]
    for failure in failures[:_REDUCED]:
        print(f"seed {failure['seed']}: {failure['verdict']}, {failure.get('file', 'not written out')}")
    print(f"{sum(report['programs'].values())} programs, {len(failures)} failures")
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
