"""A worker's turn on a GPU on which other workers compile.

Compiling is work of the CPU, so several workers may compile for one GPU. But measurements meanwhile, by
Inductor's tuning or PyGraph's selection, must find the GPU otherwise idle, so only one worker at a time
has the turn. (The work of a program's very first call, between compilations, is not measured.)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

from torch._inductor.runtime.benchmarking import benchmarker

_POLL_SECONDS = 0.05


class Turn:
    """Of one worker; its token is the one that run_lanes() gave to its command.

    Without a token there are no others, and nothing is waited for.
    """

    def __init__(self, token: str = "") -> None:
        self._token = pathlib.Path(token) if token else None
        self._depth = 0
        self.waited = 0.0  # seconds, for the GPU

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """No other worker measures on this GPU meanwhile. May be nested."""
        if self._token is None or self._depth > 0:
            yield
            return
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        with self._token.with_name(f"gpu{gpu}.lock").open("w") as lock:
            start = time.perf_counter()
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
            self.waited += time.perf_counter() - start
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    @contextlib.contextmanager
    def tunes_alone(self) -> Iterator[None]:
        """Inductor's measurements of kernels are made alone."""
        measured = benchmarker.benchmark_gpu

        def benchmark_gpu(*args: Any, **kwargs: Any) -> Any:
            with self.alone():
                return measured(*args, **kwargs)

        benchmarker.benchmark_gpu = benchmark_gpu
        try:
            yield
        finally:
            del benchmarker.benchmark_gpu  # the class's own

    def wait_until_all_have_compiled(self) -> None:
        """Returns when this worker may measure times."""
        if self._token is None:
            return
        self._token.with_suffix(".ready").touch()
        while not self._token.with_suffix(".go").exists():
            time.sleep(_POLL_SECONDS)
