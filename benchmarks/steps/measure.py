"""Measures one workload of whole steps: all variants in one process.

Each variant is built and makes its first steps, one variant after the other; this gives the memory that
it adds. Then the results of the same steps from the same state are compared. Then all are timed in
rounds, one after the other in each round, on quiet CPUs (quiet_cpu.py). A variant that fails has a row
with the error, and the others go on. If a variant breaks the process's access to the GPU, the process
ends, and the runner starts another one without that variant (``NOW``, see :mod:`benchmarks.run`).
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from benchmarks import device_memory
from benchmarks.quiet_cpu import QuietCpu
from benchmarks.steps.program import StepWorkload
from benchmarks.steps.variants import Variant, make, names_for
from benchmarks.turn import Turn
from pygraph import runtime

NOW = "NOW "  # before the name of the variant that comes next, in a worker's output
BROKEN = 3  # a worker's exit status
_FIRST_STEPS, _MOST_FIRST_STEPS = 12, 60  # of a variant without graphs of PyGraph's, and of one with
_COMPARED_STEPS = 10
_ROUNDS = 7
_BLOCK_SECONDS, _LEAST_STEPS = 0.04, 15  # of a block
_RECOMPILE_LIMIT = 8  # Dynamo's, per variant
_BATCHES = 4
_T = TypeVar("_T")


@dataclasses.dataclass
class StepRow:
    """One variant of one workload. Microseconds per step, memory in MiB; None: not measured."""

    workload: str
    variant: str
    batch: int
    us: float | None = None  # steps in a row
    us_spread: float | None = None  # (largest - smallest) / median over the rounds
    host_us: float | None = None  # of the caller's thread: the median of single steps
    disturbed: int = 0  # rounds in which no CPU stayed quiet
    peak_mib: float | None = None  # device memory in use in later steps, with model and optimizer
    compile_s: float | None = None  # until its first steps were made
    # Distance from "eager" after as many steps: 0 is equal bits. Of "eager": from itself once more.
    rel_err: float | None = None
    graphs: dict[str, int] = dataclasses.field(default_factory=dict)  # PyGraph's, by their states
    reasons: list[str] = dataclasses.field(default_factory=list)  # why PyGraph has no graph
    error: str = ""


class StepMeasurement:
    """Of one workload, in this process."""

    def __init__(self, workload: StepWorkload, device: str, turn: Turn) -> None:
        self._workload = workload
        self._turn = turn
        self._device = device
        self.rows: dict[str, StepRow] = {}
        torch.manual_seed(0)
        self._batches = [workload.make_batch(workload.batch, device) for _ in range(_BATCHES)]
        self._cpu = QuietCpu() if device == "cuda" else None

    def run(self, names: Sequence[str]) -> Iterator[StepRow]:
        """The rows, those of variants that fail first."""
        self.rows = {name: StepRow(self._workload.name, name, self._workload.batch) for name in names}
        self._load_libraries()
        ready: list[Variant] = []
        for name in names:
            with self._turn.tunes_alone():
                variant = self._try(name, partial(self._prepare, name))
            if variant is None:
                yield self.rows[name]
            else:
                ready.append(variant)
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()  # those that still compile need it
        self._turn.wait_until_all_have_compiled()
        for phase in (self._compare, self._time):
            phase(ready)
            yield from (self.rows[v.name] for v in ready if self.rows[v.name].error)
            ready = [v for v in ready if not self.rows[v.name].error]
        for variant in ready:
            yield self.rows[variant.name]

    def _try(self, name: str, act: Callable[[], _T]) -> _T | None:
        """Acts for a variant. None, and an error in its row, where that fails."""
        print(NOW + name, flush=True)
        try:
            result = act()
            self._synchronize()
            return result
        except Exception as error:
            self.rows[name].error = f"{type(error).__name__}: {runtime.first_line(error)}"
            traceback.print_exc()
        gc.collect()
        try:
            self._synchronize()
        except Exception as error:  # nothing more can be done on the GPU by this process
            raise SystemExit(BROKEN) from error
        return None

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _load_libraries(self) -> None:
        """Their memory is no variant's."""
        try:
            variant = Variant("eager", self._workload, self._device)
            for batch in self._batches:
                variant.step(batch)
        except Exception:
            traceback.print_exc()  # the variant's row will tell

    def _steps(self, variant: Variant, count: int) -> None:
        for i in range(count):
            variant.step(self._batches[i % _BATCHES])

    def _prepare(self, name: str) -> Variant:
        gc.collect()
        measures = self._device == "cuda"
        if measures:
            # What cuBLAS keeps stays: graphs made by hand use it.
            torch.cuda.synchronize()
            runtime.release_workspaces()  # of other variants' graphs, which this one's would share
            torch.cuda.empty_cache()
            before = device_memory.mark()
        others = set(runtime.partitions)
        start, waited = time.perf_counter(), self._turn.waited
        variant = make(name, self._workload, self._device, self._batches[0])
        self._steps(variant, 1)
        with self._turn.alone():
            made = 1
            while made < _FIRST_STEPS or (_is_undecided(others) and made < _MOST_FIRST_STEPS):
                self._steps(variant, 1)
                made += 1
            row = self.rows[name]
            row.compile_s = time.perf_counter() - start - (self._turn.waited - waited)
            if measures:
                device_memory.restart()
                self._steps(variant, 3)
                row.peak_mib = device_memory.used_since(before)
        entries = _new_entries(others)
        row.graphs = dict(collections.Counter(entry.state.value for entry in entries))
        row.reasons = sorted({entry.reason for entry in entries if entry.reason})
        return variant

    def _compare(self, ready: Sequence[Variant]) -> None:
        """Every variant's steps against those of "eager"."""
        found: dict[str, list[torch.Tensor]] = {}
        for variant in ready:
            values = self._try(variant.name, partial(self._trained, variant))
            if values is not None:
                found[variant.name] = values
        expected = found.get("eager")
        if expected is None:
            return
        eager = next(variant for variant in ready if variant.name == "eager")
        again = self._try("eager", partial(self._trained, eager))
        if again is not None:
            found["eager"] = again
        for name, values in found.items():
            self.rows[name].rel_err = distance(expected, values)

    def _trained(self, variant: Variant) -> list[torch.Tensor]:
        """Losses, parameters and buffers after steps from the initial state and a fixed seed."""
        variant.program.restart(variant.initial)
        torch.manual_seed(1234)
        losses: list[torch.Tensor] = []
        for i in range(_COMPARED_STEPS):
            losses += [loss.clone() for loss in variant.step(self._batches[i % _BATCHES])]
        return [torch.stack(losses), *[t.detach().clone() for t in variant.program.tensors()]]

    def _time(self, ready: Sequence[Variant]) -> None:
        counts: dict[str, int] = {}
        for variant in ready:
            count = self._try(variant.name, partial(self._steps_per_block, variant))
            counts[variant.name] = count or 0
        times: dict[str, list[tuple[float, float]]] = {variant.name: [] for variant in ready}
        gc.collect()
        gc.disable()
        for turn in range(_ROUNDS):
            going = [variant for variant in ready if not self.rows[variant.name].error]
            first = turn % max(1, len(going))  # nobody always runs after the same one
            for variant in going[first:] + going[:first]:
                block = partial(self._block, variant, counts[variant.name])
                made = self._try(variant.name, partial(self._cpu.make, block) if self._cpu else block)
                if made is not None:
                    times[variant.name].append(made)
                if self._cpu is not None:
                    self.rows[variant.name].disturbed += self._cpu.take_disturbed()
            gc.collect()
        gc.enable()
        for variant in (v for v in ready if not self.rows[v.name].error):
            row, (periods, hosts) = self.rows[variant.name], zip(*times[variant.name], strict=True)
            row.us, row.host_us = statistics.median(periods), statistics.median(hosts)
            row.us_spread = (max(periods) - min(periods)) / row.us

    def _steps_per_block(self, variant: Variant) -> int:
        self._steps(variant, 2)
        self._synchronize()
        start = time.perf_counter()
        self._steps(variant, 4)
        self._synchronize()
        return max(_LEAST_STEPS, min(400, int(_BLOCK_SECONDS / ((time.perf_counter() - start) / 4))))

    def _block(self, variant: Variant, count: int) -> tuple[float, float]:
        """Microseconds per step until the GPU is done, and of the host in one step: the median, because
        the first steps after the wait for the GPU find the CPU's caches empty, and a step waits for the
        GPU where the queue of launches is full (after nine of the LSTM's)."""
        self._steps(variant, 3)
        self._synchronize()
        hosts = []
        start = time.perf_counter()
        for i in range(count):
            begun = time.perf_counter()
            variant.step(self._batches[i % _BATCHES])
            hosts.append(time.perf_counter() - begun)
        self._synchronize()
        period = (time.perf_counter() - start) / count
        return period * 1e6, statistics.median(hosts) * 1e6


def measure_steps(
    workload: StepWorkload, variants: Sequence[str], turn: Turn | None = None, device: str = "cuda"
) -> Iterator[StepRow]:
    """Measures the workload in this process; a row for each variant that this version has."""
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch._dynamo.config.recompile_limit = _RECOMPILE_LIMIT * len(variants)
    yield from StepMeasurement(workload, device, turn or Turn()).run(names_for(variants))


def distance(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    """The larger of two distances in the 2-norm, each over the norm of what is expected: of all losses,
    and of all parameters and buffers together. Not a number where a value is none."""
    errors: list[float] = []
    for part in (slice(0, 1), slice(1, None)):
        pairs = list(zip(expected[part], found[part], strict=True))
        error = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
        norm = sum(float(a.double().square().sum()) for a, _ in pairs)
        errors.append(math.sqrt(error / max(norm, 1e-300)))
    return next((error for error in errors if math.isnan(error)), max(errors))


def _new_entries(others: set[Any]) -> list[Any]:
    return [entry for p in set(runtime.partitions) - others for entry in p.entries.copy().values()]


def _is_undecided(others: set[Any]) -> bool:
    """Whether a graph may still come into use."""
    return any(entry.state.value in ("uncaptured", "measuring") for entry in _new_entries(others))
