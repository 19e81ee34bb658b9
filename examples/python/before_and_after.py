"""What the examples have in common: their arguments, and times before and after."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BEFORE = "none"


def arguments(description: str) -> argparse.Namespace:
    """The command line. backends: "none" is the program without torch.compile."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--size", choices=["small", "base"], default="base")
    parser.add_argument("--backends", nargs="+", default=[BEFORE, "inductor", "pygraph"])
    parser.add_argument(
        "--first-steps", type=int, default=30, help="not timed: compile, record, select"
    )
    parser.add_argument("--steps", type=int, default=20, help="timed, five times")
    return parser.parse_args()


def compare(
    options: argparse.Namespace, make_step: Callable[[str], Callable[[], Any]]
) -> dict[str, float]:
    """Prints and returns the milliseconds of a step with each backend.

    make_step: gives the program's step with a backend, from the same start each time.
    """
    print(torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU: no graphs here, only a check")
    times: dict[str, float] = {}
    for backend in options.backends:
        torch._dynamo.reset()
        gc.collect()
        torch.manual_seed(0)
        step = make_step(backend)
        start = time.perf_counter()
        for _ in range(options.first_steps):
            step()
        _synchronize()
        first = time.perf_counter() - start
        times[backend] = statistics.median(_milliseconds(step, options.steps) for _ in range(5))
        gain = times[options.backends[0]] / times[backend]
        print(f"{backend:10} {times[backend]:9.3f} ms a step  {gain:5.2f} x  first steps {first:.1f} s")
    return times


def compiled(function: Any, backend: str) -> Any:
    """The function or module, compiled unless the backend is "none"."""
    return function if backend == BEFORE else torch.compile(function, backend=backend)


def _milliseconds(step: Callable[[], Any], steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        step()
    _synchronize()
    return (time.perf_counter() - start) / steps * 1e3


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
