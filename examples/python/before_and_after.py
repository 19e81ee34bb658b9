"""Shared code of the examples: their arguments, and times before and after."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BEFORE = "none"
GRAPH, BOTH = "graph", "both"  # pygraph.graph around the step; and the model compiled by Inductor
STEPS = (BEFORE, "pygraph", GRAPH, BOTH)
REPEATS = 5


def arguments(
    description: str, backends: Sequence[str] = (BEFORE, "inductor", "pygraph")
) -> argparse.Namespace:
    """The command line. backends: to compare; "none" is the program without torch.compile."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--size", choices=["small", "base"], default="base")
    parser.add_argument("--backends", nargs="+", default=list(backends))
    parser.add_argument(
        "--first-steps", type=int, default=30, help="not timed: compile, record, select"
    )
    parser.add_argument("--steps", type=int, default=20, help=f"timed, {REPEATS} times")
    return parser.parse_args()


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds: of the first steps together, and of a later step in each repetition."""

    first: float
    step: list[float]


def compare(
    options: argparse.Namespace, make_step: Callable[[str], Callable[[], Any]]
) -> dict[str, float]:
    """Prints and returns the milliseconds of a step with each backend.

    make_step: gives the program's step with a backend, from the same start each time.
    """

    def run(backend: str) -> Times:
        step = make_step(backend)
        return Times(_seconds(step, options.first_steps), _repeated(step, options.steps))

    return compare_runs(options, run)


def compare_runs(options: argparse.Namespace, run: Callable[[str], Times]) -> dict[str, float]:
    """As ``compare``, for a program that owns its loop.

    run: makes all steps with a backend: ``options.first_steps``, then REPEATS times ``options.steps``.
    """
    print(torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU: no graphs here, only a check")
    found: dict[str, float] = {}
    for backend in options.backends:
        torch._dynamo.reset()
        gc.collect()
        torch.manual_seed(0)
        times = run(backend)
        found[backend] = statistics.median(times.step) * 1e3
        gain = found[options.backends[0]] / found[backend]
        milliseconds = f"{found[backend]:9.3f} ms a step"
        print(f"{backend:10} {milliseconds}  {gain:5.2f} x  first steps {times.first:.1f} s")
    return found


def compiled(function: Any, backend: str) -> Any:
    """The function or module, compiled unless the backend is "none" or "graph"."""
    if backend in (BEFORE, GRAPH):
        return function
    return torch.compile(function, backend="inductor" if backend == BOTH else backend)


def graphed(step: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """The step, in a graph of its own for "graph" and "both"."""
    if backend not in (GRAPH, BOTH):
        return step
    import pygraph

    graph: Callable[..., Any] = pygraph.graph(step)
    return graph


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _repeated(step: Callable[[], Any], steps: int) -> list[float]:
    return [_seconds(step, steps) / steps for _ in range(REPEATS)]


def _seconds(step: Callable[[], Any], steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return time.perf_counter() - start
