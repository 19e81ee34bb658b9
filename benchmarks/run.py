"""Runs a suite and writes <folder>/<gpu>.json (<gpu>_paper.json), a Markdown table and, with --html,
figures and a page.

    python -m benchmarks.run [--suite quick|paper] [--only NAME ...] [--resume] [--html]

Each workload runs in its own process, with a time limit. Rows of workloads that were measured before
and not now are kept; --resume leaves out those that were measured at this commit.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.lanes import Outcome, run_lanes
from benchmarks.measure import measure
from benchmarks.paper import PAPER
from benchmarks.results_table import details, markdown, page
from benchmarks.turn import Turn
from benchmarks.variants import ABLATION, VARIANTS, names_for
from benchmarks.workloads import WORKLOADS, Workload

_FOLDER = pathlib.Path(__file__).parent / "results"
SUITES = {"quick": WORKLOADS, "paper": PAPER}


def choose(suite: str, only: Sequence[str] | None) -> list[Workload]:
    """The suite's workloads whose key ("name/mode") contains one of ``only``, or all.

    Raises ValueError, with the valid keys, where nothing is chosen.
    """
    chosen = [w for w in SUITES[suite] if only is None or any(name in w.key for name in only)]
    if not chosen:
        keys = ", ".join(w.key for w in SUITES[suite])
        raise ValueError(f"no workload of suite {suite!r} is called {only}; there are: {keys}")
    return chosen


def is_measured(document: dict[str, Any], workload: Workload, variants: Sequence[str]) -> bool:
    """Whether the document has all variants that the workload allows, at the document's commit."""
    rows = {
        row["backend"]
        for row in document["rows"]
        if (row["workload"], row["mode"]) == (workload.name, workload.mode)
        and row.get("commit") == document.get("commit")
    }
    return set(names_for(workload, variants)) <= rows


def merge(document: dict[str, Any], workload: Workload, rows: Sequence[dict[str, Any]]) -> None:
    """Puts the rows in the place of older ones of the workload. NaN becomes null."""
    kept = [
        row
        for row in document["rows"]
        if (row["workload"], row["mode"]) != (workload.name, workload.mode)
    ]
    fresh = [
        {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
        | {"commit": document["commit"]}
        for row in rows
    ]
    document["rows"] = kept + fresh


def _machine() -> dict[str, str]:
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
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": str(torch.get_num_threads()),
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str:
    result = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or "unknown"


def _command(suite: str, workload: Workload, variants: Sequence[str], token: str = "") -> list[str]:
    command = [sys.executable, "-m", "benchmarks.run", "--suite", suite, "--worker", workload.key]
    return [*command, "--variants", *variants, *(["--token", token] if token else [])]


def _run_worker(command: list[str], timeout: float) -> Outcome:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Outcome("", None)
    return Outcome(done.stdout, done.returncode)


def _rows_in(outcome: Outcome, workload: Workload, console: Console) -> list[dict[str, Any]]:
    """The rows that a worker printed; the rest of what it printed goes to the console."""
    rows = []
    for line in outcome.output.splitlines():
        if line.startswith("ROW "):
            rows.append(json.loads(line[4:]))
        elif line.strip():
            console.print(line, highlight=False, markup=False)
    if outcome.status is None:
        console.print(f"  {workload.key}: no result within its time", highlight=False)
    elif outcome.status != 0:
        console.print(f"  {workload.key}: the process ended with {outcome.status}", highlight=False)
    return rows


def _print_rows(rows: list[dict[str, Any]], console: Console) -> None:
    for row in rows:
        console.print(
            f"    {row['backend']:<16} {row['us']:>10.1f} us  latency {row['latency_us']:>10.1f}"
            f"  host {row['host_us']:>9.1f}  peak {row['peak_mib']:>8.0f} MiB"
            f"  compile {row['compile_s'] or math.nan:>5.1f} s {row['compile_peak_mib']:>8.0f} MiB"
            f"  in graphs {row['in_graphs']:.3f}  err {row['rel_err']}",
            highlight=False,
        )


def longest_first(due: Sequence[Workload], document: dict[str, Any]) -> list[Workload]:
    """By how long they took to compile when they were last measured; what never was comes first."""
    seconds: dict[tuple[str, str], float] = collections.defaultdict(float)
    for row in document["rows"]:
        seconds[row["workload"], row["mode"]] += row["compile_s"] or 0
    return sorted(due, key=lambda w: -seconds.get((w.name, w.mode), math.inf))


def parts(due: Sequence[Workload], document: dict[str, Any], most: int) -> list[list[Workload]]:
    """At most so many workloads at a time; in each part about as much memory, as last measured."""
    mib: dict[tuple[str, str], float] = collections.defaultdict(float)
    for row in document["rows"]:
        mib[row["workload"], row["mode"]] += row["peak_mib"] or 0
    by_memory = sorted(due, key=lambda w: -mib[w.name, w.mode])
    count = math.ceil(len(by_memory) / most)
    return [by_memory[i::count] for i in range(count)]


def _run_on_several(
    options: argparse.Namespace, due: Sequence[Workload], keep: Callable[[Workload, Outcome], None]
) -> None:
    by_key = {workload.key: workload for workload in due}

    def command_of(workload: Workload) -> Callable[[str], list[str]]:
        return lambda token: _command(options.suite, workload, options.variants, token)

    run_lanes(
        {key: command_of(workload) for key, workload in by_key.items()},
        options.gpus,
        timeout=options.timeout,
        at_a_time=max(1, len(options.gpus) // 2),
        report=lambda key, outcome: keep(by_key[key], outcome),
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PyGraph's benchmarks")
    parser.add_argument("--suite", choices=SUITES, default="quick")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="workloads whose name contains this")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=(*VARIANTS, *ABLATION))
    parser.add_argument("--timeout", type=float, default=900, help="seconds per workload")
    parser.add_argument("--gpus", nargs="+", metavar="N", help="spread the workloads over these GPUs")
    parser.add_argument("--together", type=int, metavar="N", help="with --gpus: time after every N")
    parser.add_argument("--resume", action="store_true", help="leave out what this commit has measured")
    parser.add_argument("--html", action="store_true", help="write figures and a page (matplotlib)")
    parser.add_argument("--out", type=pathlib.Path, default=_FOLDER, help="folder for results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--token", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if not torch.cuda.is_available():
        print("the benchmarks need an NVIDIA GPU", file=sys.stderr)
        return 1
    if options.worker:
        workload = next(w for w in SUITES[options.suite] if w.key == options.worker)
        for row in measure(workload, tuple(options.variants), Turn(options.token or "")):
            print("ROW " + json.dumps(dataclasses.asdict(row)), flush=True)
        return 0
    try:
        chosen = choose(options.suite, options.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2

    machine = _machine()
    name = machine["gpu"].replace(" ", "_") + ("" if options.suite == "quick" else f"_{options.suite}")
    path = options.out / f"{name}.json"
    document = json.loads(path.read_text()) if path.exists() else {"rows": []}
    document |= {"machine": machine, "commit": _commit()}
    console = Console()
    due = [
        workload
        for workload in chosen
        if not (options.resume and is_measured(document, workload, options.variants))
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(due))

        def keep(workload: Workload, outcome: Outcome) -> None:
            rows = _rows_in(outcome, workload, console)
            if rows:  # what an earlier run measured is better than nothing
                merge(document, workload, rows)
            options.out.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(document, indent=1) + "\n")
            _print_rows(rows, console)
            progress.advance(task)

        if options.gpus:
            for part in parts(due, document, options.together or max(1, len(due))):
                _run_on_several(options, longest_first(part, document), keep)
        for workload in [] if options.gpus else due:
            progress.update(task, description=workload.key)
            command = _command(options.suite, workload, options.variants)
            keep(workload, _run_worker(command, options.timeout))
    table = markdown(document)
    path.with_suffix(".md").write_text(f"{table}\n{details(document)}")
    print(table)
    if options.html:
        from benchmarks import figures

        drawings = figures.write(document, options.out / f"{name}_figures")
        path.with_suffix(".html").write_text(page(document, drawings), "utf-8")
        print(path.with_suffix(".html"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
