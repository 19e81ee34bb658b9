"""The rows of a file of results: which belong to a workload, what is measured, what remains.

A worker prints each row, and before each part of its work ``NOW`` and the variant of that part. If a
process ends too early, it ended in that variant, and another process measures the others.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from benchmarks.lanes import Outcome
from benchmarks.steps.measure import NOW, StepRow
from benchmarks.suites import AnyWorkload, Suite, variant_of, workload_of


def is_measured(document: dict[str, Any], workload: AnyWorkload, names: Sequence[str]) -> bool:
    """Whether the document has all these variants, without an error, at the document's commit."""
    rows = {
        variant_of(row)
        for row in document["rows"]
        if workload_of(row) == (workload.name, workload.mode)
        and row.get("commit") == document.get("commit")
        and not row.get("error")
    }
    return set(names) <= rows


def merge(document: dict[str, Any], workload: AnyWorkload, rows: Sequence[dict[str, Any]]) -> None:
    """Puts the rows in the place of older ones of the workload. NaN becomes null."""
    kept = [row for row in document["rows"] if workload_of(row) != (workload.name, workload.mode)]
    fresh = [
        {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
        | {"commit": document["commit"]}
        for row in rows
    ]
    document["rows"] = kept + fresh


def ended_in(outcome: Outcome) -> str:
    """The variant in which a worker's process ended too early; empty if none is known."""
    names = [line[len(NOW) :] for line in outcome.output.splitlines() if line.startswith(NOW)]
    return names[-1] if names and outcome.status != 0 else ""


class Collected:
    """Rows of a suite's workloads, from as many processes as it takes."""

    def __init__(self, suite: Suite, due: Sequence[AnyWorkload], wanted: Sequence[str]) -> None:
        self.left = {w.key: suite.names_for(w, wanted) for w in due}  # variants for the next process
        self._failed: dict[str, list[dict[str, Any]]] = {w.key: [] for w in due}

    def add(
        self, workload: AnyWorkload, rows: Sequence[dict[str, Any]], outcome: Outcome
    ) -> list[dict[str, Any]]:
        """Takes what a process gave. Returns all rows of the workload so far; ``left`` has what another
        process is to measure."""
        key = workload.key
        failed, culprit = self._failed[key], ended_in(outcome)
        known = {variant_of(row) for row in rows}
        failed += [row for row in rows if row.get("error")]
        measured = [row for row in rows if not row.get("error")]
        if not culprit:
            self.left[key] = []
            return [*measured, *failed]
        if culprit not in known:
            ended = ": its time was up" if outcome.status is None else f" ended with {outcome.status}"
            failed.append(failure_row(workload, culprit, f"the process{ended}"))
        gone = {variant_of(row) for row in failed}
        self.left[key] = [name for name in self.left[key] if name not in gone]
        return [*measured, *failed]


def failure_row(workload: AnyWorkload, variant: str, error: str) -> dict[str, Any]:
    batch = getattr(workload, "batch", 0)
    return dataclasses.asdict(StepRow(workload.name, variant, batch, error=error))


def longest_first(due: Sequence[AnyWorkload], document: dict[str, Any]) -> list[AnyWorkload]:
    """By how long they took to compile when they were last measured; what never was comes first."""
    seconds: dict[tuple[str, str], float] = collections.defaultdict(float)
    for row in document["rows"]:
        seconds[workload_of(row)] += row["compile_s"] or 0
    return sorted(due, key=lambda w: -seconds.get((w.name, w.mode), math.inf))


def parts(due: Sequence[AnyWorkload], document: dict[str, Any], most: int) -> list[list[AnyWorkload]]:
    """At most so many workloads at a time; in each part about as much memory, as last measured."""
    mib: dict[tuple[str, str], float] = collections.defaultdict(float)
    for row in document["rows"]:
        mib[workload_of(row)] += row["peak_mib"] or 0
    by_memory = sorted(due, key=lambda w: -mib[w.name, w.mode])
    count = math.ceil(len(by_memory) / most)
    return [by_memory[i::count] for i in range(count)]
