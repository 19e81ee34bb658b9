"""The suites of the runner, and the differences between suites of models and of whole steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from benchmarks import measure, results_table, variants
from benchmarks.paper import PAPER
from benchmarks.small_models import SMALL
from benchmarks.steps import table as steps_table
from benchmarks.steps import variants as steps_variants
from benchmarks.steps.measure import measure_steps
from benchmarks.steps.workloads import STEPS
from benchmarks.turn import Turn
from benchmarks.workloads import WORKLOADS, Workload


class AnyWorkload(Protocol):
    """What the runner needs to know of one."""

    @property
    def name(self) -> str: ...
    @property
    def mode(self) -> str: ...
    @property
    def key(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Suite:
    """variants: unless others are asked for; more: those that may be. measure: the rows of a workload,
    given variants, the worker's turn and a device. names_for: the variants that it will have."""

    workloads: Sequence[AnyWorkload]
    variants: tuple[str, ...]
    more: tuple[str, ...]
    measure: Callable[[Any, tuple[str, ...], Turn, str], Iterable[Any]]
    names_for: Callable[[Any, Sequence[str]], list[str]]
    tables: Callable[[dict[str, Any]], str]
    line: Callable[[dict[str, Any]], str]


def _model_tables(document: dict[str, Any]) -> str:
    return f"{results_table.markdown(document)}\n{results_table.details(document)}"


def _model_line(row: dict[str, Any]) -> str:
    return (
        f"{row['backend']:<16} {row['us']:>10.1f} us  latency {row['latency_us']:>10.1f}"
        f"  host {row['host_us']:>9.1f}  peak {row['peak_mib']:>8.0f} MiB"
        f"  compile {row['compile_s'] or math.nan:>5.1f} s {row['compile_peak_mib']:>8.0f} MiB"
        f"  in graphs {row['in_graphs']:.3f}  err {row['rel_err']}"
    )


def _step_line(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"{row['variant']:<20} failed: {row['error']}"
    return (
        f"{row['variant']:<20} {row['us']:>9.1f} us  spread {row['us_spread']:>6.1%}"
        f"  host {row['host_us']:>9.1f}  peak {row['peak_mib'] or math.nan:>7.0f} MiB"
        f"  ready in {row['compile_s']:>5.1f} s  err {row['rel_err']}  {row['graphs'] or ''}"
    )


def _of_models(workloads: Sequence[Workload]) -> Suite:
    return Suite(
        workloads=workloads,
        variants=variants.VARIANTS,
        more=(*variants.ABLATION, results_table.WITHOUT_POLYFILLS),
        measure=lambda workload, names, turn, _: measure.measure(workload, names, turn),
        names_for=variants.names_for,
        tables=_model_tables,
        line=_model_line,
    )


MODELS: dict[str, Sequence[Workload]] = {"quick": WORKLOADS, "paper": PAPER, "small": SMALL}
SUITES: dict[str, Suite] = {
    **{name: _of_models(workloads) for name, workloads in MODELS.items()},
    "steps": Suite(
        workloads=STEPS,
        variants=steps_variants.VARIANTS,
        more=(),
        measure=measure_steps,
        names_for=lambda _, names: steps_variants.names_for(names),
        tables=steps_table.tables,
        line=_step_line,
    ),
}


def workload_of(row: dict[str, Any]) -> tuple[str, str]:
    """Name and mode of the workload that a row is of."""
    return row["workload"], row.get("mode", "step")


def variant_of(row: dict[str, Any]) -> str:
    """The variant that a row is of."""
    return str(row["variant"] if "variant" in row else row["backend"])
