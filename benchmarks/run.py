"""Runs a suite and writes <folder>/<gpu>.json (<gpu>_<suite>.json for the others), a Markdown table
and, with --html, figures and a page.

    python -m benchmarks.run [--suite quick|paper|small|steps] [--only NAME ...] [--resume] [--html]

Each workload runs in its own process, with a time limit. Rows of workloads that were measured before
and not now are kept; --resume leaves out those that were measured at this commit. If a process ends in
the middle of a variant of whole steps, another one measures the workload without that variant.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.lanes import Outcome, run_lanes
from benchmarks.results_table import page
from benchmarks.rows import Collected, is_measured, longest_first, merge, parts
from benchmarks.steps.measure import NOW
from benchmarks.suites import MODELS, SUITES, AnyWorkload
from benchmarks.turn import Turn

_FOLDER = pathlib.Path(__file__).parent / "results"


def choose(suite: str, only: Sequence[str] | None) -> list[AnyWorkload]:
    """The suite's workloads whose key ("name/mode") contains one of ``only``, or all.

    Raises ValueError, with the valid keys, where nothing is chosen.
    """
    workloads = SUITES[suite].workloads
    chosen = [w for w in workloads if only is None or any(name in w.key for name in only)]
    if not chosen:
        keys = ", ".join(w.key for w in workloads)
        raise ValueError(f"no workload of suite {suite!r} is called {only}; there are: {keys}")
    return chosen


def _machine(device: str) -> dict[str, str]:
    common = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": str(torch.get_num_threads()),
        "date": time.strftime("%Y-%m-%d"),
    }
    if device == "cpu":
        return {"gpu": "cpu", "driver": "none", **common}
    properties = torch.cuda.get_device_properties(0)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "gpu": properties.name,
        "gpu_memory_gib": f"{properties.total_memory / 2**30:.0f}",
        "driver": driver.splitlines()[0] if driver else "unknown",
        "cuda": str(torch.version.cuda),
        **common,
    }


def _commit() -> str:
    result = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or "unknown"


def _command(
    options: argparse.Namespace, workload: AnyWorkload, variants: Sequence[str], token: str = ""
) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.run", "--suite", options.suite]
    command += ["--device", options.device, "--worker", workload.key, "--variants", *variants]
    return [*command, *(["--token", token] if token else [])]


def _run_worker(command: list[str], timeout: float) -> Outcome:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        output = error.stdout or ""
        return Outcome(output.decode() if isinstance(output, bytes) else output, None)
    return Outcome(done.stdout, done.returncode)


def _rows_in(outcome: Outcome, workload: AnyWorkload, console: Console) -> list[dict[str, Any]]:
    """The rows that a worker printed; the rest of what it printed goes to the console."""
    rows = []
    for line in outcome.output.splitlines():
        if line.startswith("ROW "):
            rows.append(json.loads(line[4:]))
        elif line.strip() and not line.startswith(NOW):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if outcome.status is None:
        console.print(f"  {workload.key}: no result within its time", highlight=False)
    elif outcome.status != 0:
        console.print(f"  {workload.key}: the process ended with {outcome.status}", highlight=False)
    return rows


_Keep = Callable[[AnyWorkload, Outcome], None]


def _run_on_several(
    options: argparse.Namespace,
    due: Sequence[AnyWorkload],
    variants: Mapping[str, Sequence[str]],
    keep: _Keep,
    until: float,
) -> None:
    by_key = {workload.key: workload for workload in due}

    def command_of(workload: AnyWorkload) -> Callable[[str], list[str]]:
        return lambda token: _command(options, workload, variants[workload.key], token)

    def report(key: str, outcome: Outcome) -> None:
        if outcome.status is None and time.monotonic() > until:
            print(f"  {key}: left to another run")
        else:
            keep(by_key[key], outcome)

    run_lanes(
        {key: command_of(workload) for key, workload in by_key.items()},
        options.gpus,
        timeout=options.timeout,
        at_a_time=max(1, len(options.gpus) // 2),
        report=report,
        until=until,
    )


def _run_all(
    options: argparse.Namespace,
    due: Sequence[AnyWorkload],
    document: dict[str, Any],
    collected: Collected,
    keep: _Keep,
) -> None:
    """Until no variant is left that a process that ended early did not come to, or the time is over."""
    until = time.monotonic() + 60 * options.minutes
    while due and time.monotonic() < until:
        if options.gpus:
            for part in parts(due, document, options.together or max(1, len(due))):
                ordered = longest_first(part, document)
                _run_on_several(options, ordered, collected.left.copy(), keep, until)
        for workload in [] if options.gpus else due:
            if time.monotonic() > until:
                break
            command = _command(options, workload, collected.left[workload.key])
            keep(workload, _run_worker(command, options.timeout))
        due = [workload for workload in due if collected.left[workload.key]]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PyGraph's benchmarks")
    every = {name: None for suite in SUITES.values() for name in (*suite.variants, *suite.more)}
    parser.add_argument("--suite", choices=SUITES, default="quick")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="workloads whose name contains this")
    parser.add_argument("--variants", nargs="+", choices=every, help="the suite's own unless given")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: steps alone")
    parser.add_argument("--timeout", type=float, default=900, help="seconds per workload")
    parser.add_argument("--gpus", nargs="+", metavar="N", help="spread the workloads over these GPUs")
    minutes = "stop compiling after so many: time what has compiled, leave the rest to --resume"
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="N", help=minutes)
    parser.add_argument("--together", type=int, metavar="N", help="with --gpus: time after every N")
    parser.add_argument("--resume", action="store_true", help="leave out what this commit has measured")
    parser.add_argument("--html", action="store_true", help="write figures and a page (matplotlib)")
    parser.add_argument("--out", type=pathlib.Path, default=_FOLDER, help="folder for results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--token", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.device == "cpu" and options.suite in MODELS:
        parser.error(f"suite {options.suite!r} needs a GPU")
    suite = SUITES[options.suite]
    options.variants = options.variants or list(suite.variants)
    unknown = [name for name in options.variants if name not in (*suite.variants, *suite.more)]
    if unknown:
        parser.error(f"suite {options.suite!r} has no variant {unknown[0]!r}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("the benchmarks need an NVIDIA GPU", file=sys.stderr)
        return 1
    suite = SUITES[options.suite]
    if options.worker:
        workload = next(w for w in suite.workloads if w.key == options.worker)
        turn = Turn(options.token or "")
        for row in suite.measure(workload, tuple(options.variants), turn, options.device):
            print("ROW " + json.dumps(dataclasses.asdict(row)), flush=True)
        return 0
    try:
        chosen = choose(options.suite, options.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2

    machine = _machine(options.device)
    name = machine["gpu"].replace(" ", "_") + ("" if options.suite == "quick" else f"_{options.suite}")
    path = options.out / f"{name}.json"
    document = json.loads(path.read_text()) if path.exists() else {"rows": []}
    document |= {"machine": machine, "commit": _commit()}
    console = Console()
    due = [
        workload
        for workload in chosen
        if not (
            options.resume
            and is_measured(document, workload, suite.names_for(workload, options.variants))
        )
    ]
    collected = Collected(suite, due, options.variants)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(options.suite, total=len(due))

        def keep(workload: AnyWorkload, outcome: Outcome) -> None:
            rows = collected.add(workload, _rows_in(outcome, workload, console), outcome)
            if rows:  # what an earlier run measured is better than nothing
                merge(document, workload, rows)
            options.out.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(document, indent=1) + "\n")
            console.print(f"  {workload.key}", highlight=False)
            for row in rows:
                console.print("    " + suite.line(row), highlight=False, markup=False, soft_wrap=True)
            if not collected.left[workload.key]:
                progress.advance(task)

        _run_all(options, due, document, collected, keep)
    tables = suite.tables(document)
    path.with_suffix(".md").write_text(tables)
    print(tables)
    if options.html:
        from benchmarks import figures

        drawings = figures.write(document, options.out / f"{name}_figures")
        if options.suite in MODELS:
            path.with_suffix(".html").write_text(page(document, drawings), "utf-8")
            print(path.with_suffix(".html"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
