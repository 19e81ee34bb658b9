"""The report of a program that runs on a GPU: what was captured, what it gains."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from pygraph import runtime
from pygraph.callables.graphed import Graphed
from pygraph.callables.host.program_state import ProgramState
from pygraph.callables.observation import tensors_in
from pygraph.observations import Cut, Observation, Origin, observing
from pygraph.partition.partition import Partition
from pygraph.partition.signature import State
from pygraph.report.classify import segments
from pygraph.report.estimate import observed_cuts, strip_parts
from pygraph.report.explanation import KernelRow, Report, Share, StripPart, Timing
from pygraph.report.graph_times import graph_times
from pygraph.report.profile import Kernel, kernels_of, shares, strip, trace_call
from pygraph.report.stats import GraphStats, graph_row

_WARM_UP = 4
_LONGEST_WARM_UP = 100
_ROUNDS = 7
_UNDECIDED = (State.UNCAPTURED, State.MEASURING)
_LISTED = 40  # refusals, and kernels; programs with many shapes have as many


def measure(
    program: str, model: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Report:
    """Compiles the model again, calls it until its graphs are selected, profiles and times it."""
    model = getattr(model, "_orig_mod", model)

    def call() -> None:
        result = compiled(*args, **kwargs)
        if torch.is_grad_enabled():
            _backward(model, result)

    with observing() as observation:
        compiled = torch.compile(model, backend="pygraph")
        for i in range(_LONGEST_WARM_UP):
            if i >= _WARM_UP and not _is_waiting(observation):
                break
            call()
    return _report(program, observation, call)


def measure_step(program: str, step: Graphed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Report:
    """As :func:`measure`, for a graphed callable, of whose function new graphs are made. All changes of
    its calls are undone: tensors, gradients, attributes, containers, random numbers."""
    known = set(runtime.partitions)
    passed = {f"argument {i}": value for i, value in enumerate((*args, *kwargs.values()))}
    state = ProgramState({program: step.__wrapped__, **passed})
    fresh = step.anew()

    def call() -> None:
        fresh(*args, **kwargs)

    try:
        for i in range(_LONGEST_WARM_UP):
            found = [p for p in runtime.all_partitions() if p is fresh or p not in known]
            entries = [entry for partition in found for entry in partition.entries.copy().values()]
            if i >= _WARM_UP and not any(entry.state in _UNDECIDED for entry in entries):
                break
            call()
        return _report(program, Observation(partitions=found), call)
    finally:
        state.put_back()
        fresh.reset()


def _report(program: str, observation: Observation, call: Callable[[], None]) -> Report:
    """Times calls of a program whose graphs are made, and profiles one: replays are slow for a while
    after that (docs/explanation/profiles.md)."""
    timing = _time(call)
    with _own_names(observation) as graphs:
        events = trace_call(call)
    kernels = kernels_of(events)
    times = graph_times(events, graphs)
    gpu_us = {id(graphs[name]): time for name, time in times.items()}
    measured = bool(kernels)
    return Report(
        program=program,
        device=torch.cuda.get_device_name(),
        estimated=not measured,
        shares=shares(kernels) if measured else counted_shares(observation),
        graphs=tuple(graph_rows(observation, gpu_us)),
        cuts=tuple([*observed_cuts(observation), *refusals(observation)]),
        transformations=tuple(observation.applied),
        strip=tuple(strip(kernels) if measured else counted_strip(observation)),
        strip_unit="us" if measured else "operations",
        timing=timing,
        kernels=kernel_rows(kernels, observation.origins)[:_LISTED],
    )


def kernel_rows(kernels: Iterable[Kernel], origins: Mapping[str, Origin]) -> tuple[KernelRow, ...]:
    """Kernels by name, those with the most GPU time first."""
    by_name: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name, []).append(kernel)
    rows = []
    for name, found in by_name.items():
        origin = origins.get(name, Origin((), ()))
        inside = sum(kernel.launch is not None for kernel in found)
        us = sum(kernel.us for kernel in found)
        rows.append(KernelRow(name, len(found), inside, us, origin.operators, origin.where))
    return tuple(sorted(rows, key=lambda row: -row.us))


def _partitions(observation: Observation) -> list[Partition]:
    return cast("list[Partition]", observation.partitions)


def _is_waiting(observation: Observation) -> bool:
    """Whether any function that was called more than once is still to be recorded, or on trial."""
    return any(
        partition.is_waiting(key, entry)
        for partition in _partitions(observation)
        if not isinstance(partition, Graphed)  # it has the calls that no partition handles
        for key, entry in partition.entries.copy().items()
    )


@contextlib.contextmanager
def _own_names(observation: Observation) -> Iterator[dict[str, Any]]:
    """A context in which each graph's replays have a unique name in profiles. Yields the graphs by
    name."""
    partitions = _partitions(observation)
    found = [entry.graph for partition in partitions for entry in partition.entries.copy().values()]
    graphs = {f"pygraph graph {number}": graph for number, graph in enumerate(filter(None, found))}
    before = [graph.name for graph in graphs.values()]
    try:
        for name, graph in graphs.items():
            graph.name = name
        yield dict(graphs)
    finally:
        for name, graph in zip(before, graphs.values(), strict=True):
            graph.name = name


def graph_rows(observation: Observation, gpu_us: Mapping[int, float] | None = None) -> list[GraphStats]:
    """One row per partition and signature that was called more than once. gpu_us: GPU time by the
    graph's id."""
    rows = []
    for partition in _partitions(observation):
        for entry in partition.entries.copy().values():
            graph = entry.graph
            if graph is None and entry.state is State.UNCAPTURED:
                continue
            row = graph_row(partition.info, entry)
            rows.append(dataclasses.replace(row, gpu_us=(gpu_us or {}).get(id(graph))))
    return sorted(rows, key=lambda row: (row.state != "captured", -row.nodes))


def refusals(observation: Observation) -> list[Cut]:
    """The refused graphs, as cuts."""
    found = [
        Cut("refusal", f"{row.name} stays uncaptured: {row.reason}", row.where, row.remedy)
        for row in graph_rows(observation)
        if row.state == "refused"
    ]
    return list(dict.fromkeys(found))[:_LISTED]


def counted_shares(observation: Observation) -> tuple[Share, ...]:
    """The share of kernels in captured graphs. The other operations are those that cannot be in a
    graph."""
    captured = sum(row.nodes for row in graph_rows(observation) if row.state == "captured")
    outside = sum(part.width for part in counted_strip(observation) if part.kind == "gap")
    return (Share("kernels", captured, captured + outside),)


def counted_strip(observation: Observation) -> list[StripPart]:
    """The graphs and gaps that the compiler saw, by numbers of operations."""
    return [part for _, graph in observation.graphs for part in strip_parts(segments(graph))]


def _backward(model: Any, result: Any) -> None:
    """Gradients of all results, without touching the user's ``.grad``."""
    tensors = [t for t in tensors_in(result) if t.requires_grad]
    parameters = [p for p in getattr(model, "parameters", list)() if p.requires_grad]
    if tensors and parameters:
        total = torch.stack([t.float().sum() for t in tensors]).sum()
        torch.autograd.grad(total, parameters, allow_unused=True)


def _time(call: Callable[[], None]) -> Timing:
    def once() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e6

    with_graphs, uncaptured = [], []
    for _ in range(_ROUNDS):
        with_graphs.append(once())
        with runtime.uncaptured():
            uncaptured.append(once())
    return Timing(statistics.median(with_graphs), statistics.median(uncaptured))
