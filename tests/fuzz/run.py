"""Fuzzes PyGraph: random programs in worker processes, graphed and not.

    python -m tests.fuzz.run --count 20000 --seconds 480 --seed 0

Writes report.json, and for each of the first failures a reduced test file, into --folder. A run is
continued with --seed set to the report's ``next_seed``. Ends with code 1 after a failure.

The report is written every few seconds, and when the run is ended by SIGTERM or Ctrl-C. A run ends
within 15 s after its time, --seconds and then --reduce-seconds where there are failures, whatever its
workers do: a program that still runs is unfinished, which tells nothing of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import reproducer
from .campaign import REDUCED, Campaign
from .program import UNCAPTURED, Program, to_json
from .reduce import reduce, size_of
from .supervise import UNFINISHED, Worker

_PROGRAM_SECONDS = {"partition": 45.0, "compiled": 180.0}
_SHORT_SECONDS = 20.0  # of a program that hung before
_UNCAPTURED_RUNS = 20  # of a program that failed without PyGraph
_REMEMBERED = 20  # programs that a worker ran before one that crashed
_REPORT_SECONDS = 20.0
_LATE_SECONDS = 2.0  # after the end of what a thread waits for
_STOP_SECONDS = 3.0  # for all workers, once they are killed


def _work(campaign: Campaign, worker: Worker) -> None:
    is_first = True
    before: list[int] = []  # seeds that the worker's process has run
    while (seed := campaign.take()) is not None:
        level = campaign.level_of(seed)
        seconds = _PROGRAM_SECONDS[level] * (4 if is_first else 1)  # kernels are loaded, caches filled
        is_first = False
        reply = worker.ask(campaign.request(seed), seconds, campaign.end)
        if reply["verdict"] in ("crashed", "hung"):
            reply["detail"] += [
                f"in the series: {reply['series']}",
                f"the worker's programs before: {before[-_REMEMBERED:]}",
            ]
            _ask_again(campaign, seed, reply, worker, seconds)
            is_first = True
        elif reply.get("leaked"):  # or kept by a library from its first use on
            again = worker.ask(campaign.request(seed), seconds, campaign.end)
            reply["leaked"] = again.get("leaked", 0)
            if again["verdict"] == UNFINISHED:
                reply["verdict"] = UNFINISHED
        if reply["verdict"] == UNFINISHED:
            return
        before = [] if is_first else [*before[-_REMEMBERED:], seed]
        campaign.note(seed, reply)


def _ask_again(
    campaign: Campaign, seed: int, reply: dict[str, Any], worker: Worker, seconds: float
) -> None:
    """What a program does alone that crashed or hung. It is PyTorch's own fault if that happened
    without PyGraph, and happens without it in a process that has not used PyGraph at all."""
    verdict, request = reply["verdict"], campaign.request(seed)
    if reply["series"] == UNCAPTURED:
        request["uncaptured_runs"] = _UNCAPTURED_RUNS
        alone = worker.ask(request, 2 * seconds, campaign.end)
        if alone["verdict"] in ("crashed", "hung"):
            reply["verdict"] = f"{verdict} uncaptured"
        elif alone["verdict"] == UNFINISHED:
            reply["verdict"] = UNFINISHED  # whose fault it is remains open
    else:
        alone = worker.ask(request, seconds, campaign.end)
    same = "alone, too" if alone["verdict"] == verdict else f"alone: {alone['verdict']}"
    reply["detail"].append(same)


def _write_failures(
    campaign: Campaign, workers: Sequence[Worker], folder: Path, device: str, seconds: float
) -> None:
    """A test file for each of the first failures, with a program that is reduced as far as the time
    allows."""
    end = time.monotonic() + seconds
    left = campaign.failures[:REDUCED]
    for failure in left:
        _write_out(campaign.program(failure["seed"]), failure, folder, device)
    left = [failure for failure in left if failure["verdict"] != "harness"]
    lock = threading.Lock()

    def work(worker: Worker) -> None:
        while True:
            with lock:
                if not left:
                    return
                failure = left.pop(0)
            program = campaign.program(failure["seed"])
            until = min(end, time.monotonic() + seconds / 2)
            reduced = _reduced(program, failure["verdict"], worker, until)
            failure["reduced"] = [size_of(program), size_of(reduced)]
            _write_out(reduced, failure, folder, device)

    warm_first = sorted(workers, key=lambda worker: not worker.is_running)
    _in_threads(work, warm_first[: len(left)], end)


def _write_out(program: Program, failure: dict[str, Any], folder: Path, device: str) -> None:
    detail = failure["detail"]
    if "reduced" in failure:
        detail = ["Before it was reduced:", *detail]
    path = reproducer.write(folder / "failures", program, device, failure["verdict"], detail)
    failure["file"] = str(path)


def _reduced(program: Program, verdict: str, worker: Worker, until: float) -> Program:
    def fails(candidate: Program) -> bool:
        limit = _SHORT_SECONDS if verdict == "hung" else _PROGRAM_SECONDS[program.level]
        reply = worker.ask({"program": to_json(candidate)}, limit, until)
        found = reply["verdict"]
        return bool(reply.get("leaked")) if verdict == "leaked" else found == verdict

    return reduce(program, fails, until - time.monotonic())


def _in_threads(work: Callable[[Worker], None], workers: Sequence[Worker], end: float) -> None:
    """One thread for each worker. A thread that is not done at the end is left alone."""
    errors: list[BaseException] = []

    def guarded(worker: Worker) -> None:
        try:
            work(worker)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end + _LATE_SECONDS - time.monotonic()))
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

    def write_report() -> dict[str, Any]:
        report = campaign.report() | {"worker_starts": sum(worker.starts for worker in workers)}
        _replace(folder / "report.json", json.dumps(report, indent=1) + "\n")
        return report

    with _repeated(write_report):
        try:
            _in_threads(lambda worker: _work(campaign, worker), workers, campaign.end)
            campaign.stop_clock()
            if args.reduce_seconds > 0 and campaign.failures:
                _write_failures(campaign, workers, folder, args.device, args.reduce_seconds)
        finally:
            _stop(workers)
    return write_report()


@contextlib.contextmanager
def _repeated(write_report: Callable[[], object]) -> Iterator[None]:
    """A context in which the report is written every few seconds, and at its end."""
    is_over = threading.Event()

    def repeat() -> None:
        write_report()
        while not is_over.wait(_REPORT_SECONDS):
            write_report()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(_LATE_SECONDS)
        write_report()


def _replace(path: Path, text: str) -> None:
    """The file is whole at any time."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def _stop(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.shut()
    end = time.monotonic() + _STOP_SECONDS
    for worker in workers:
        worker.stop(max(0.1, end - time.monotonic()))


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
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminated)
    report = run(args)
    shown = {key: value for key, value in report.items() if key != "failures"}
    print(json.dumps(shown, indent=1))
    failures = report["failures"]
    for failure in failures[:REDUCED]:
        print(f"seed {failure['seed']}: {failure['verdict']}, {failure.get('file', 'not written out')}")
    print(f"{sum(report['programs'].values())} programs, {len(failures)} failures")
    raise SystemExit(1 if failures else 0)


def _terminated(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the report is being written
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
