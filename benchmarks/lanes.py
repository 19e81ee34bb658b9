"""Compiles several workloads at a time, one lane per GPU named; times none while another one compiles.

A worker compiles its variants, creates ``<token>.ready`` and waits for ``<token>.go`` (turn.py).
Meanwhile its lane starts the next workload. When all have compiled, they continue, few at a time and
never two on one GPU, because compilers would slow down the Python code that is measured.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

_POLL_SECONDS = 0.05


@dataclasses.dataclass
class Outcome:
    """What a worker printed, and how it ended: its exit status, or None where its time was up."""

    output: str
    status: int | None


@dataclasses.dataclass
class _Job:
    key: str
    gpu: str
    token: pathlib.Path
    process: subprocess.Popen[str]
    started: float
    is_late: bool = False

    @property
    def is_ready(self) -> bool:
        return self.token.with_suffix(".ready").exists()

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    def stop(self) -> None:
        """Its time is up."""
        self.is_late = True
        self.process.kill()


def run_lanes(
    commands: Mapping[str, Callable[[str], Sequence[str]]],
    gpus: Sequence[str],
    *,
    timeout: float,
    at_a_time: int,
    report: Callable[[str, Outcome], None],
    until: float = math.inf,
) -> None:
    """Runs every command, given its token, on one of the GPUs, and reports each as it ends.

    The first ones start first: the longest should. timeout: seconds for compilation, and again for
    timing. at_a_time: how many are timed together. until: when nothing compiles any more, on the clock
    of ``time.monotonic``: what has compiled is timed then, other commands are ended or not started.
    """
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for key in commands:
        waiting.put(key)
    jobs: list[_Job] = []
    with tempfile.TemporaryDirectory() as folder:

        def start(key: str, gpu: str) -> _Job:
            token = pathlib.Path(folder) / key.replace("/", "_")
            with token.with_suffix(".out").open("w") as output:
                process = subprocess.Popen(
                    commands[key](str(token)),
                    stdout=output,
                    text=True,
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
                )
            return _Job(key, gpu, token, process, time.monotonic())

        def lane(gpu: str) -> None:
            while time.monotonic() < until:
                try:
                    job = start(waiting.get_nowait(), gpu)
                except queue.Empty:
                    return
                jobs.append(job)
                while not (job.is_ready or job.is_over):
                    if time.monotonic() > min(job.started + timeout, until):
                        job.stop()
                    time.sleep(_POLL_SECONDS)

        threads = [threading.Thread(target=lane, args=(gpu,)) for gpu in gpus]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for job in _timed(jobs, timeout, at_a_time):
            status = job.process.wait()
            output = job.token.with_suffix(".out").read_text()
            report(job.key, Outcome(output, None if job.is_late else status))


def _timed(jobs: Sequence[_Job], timeout: float, at_a_time: int) -> Iterator[_Job]:
    """Lets the jobs that have compiled measure. Each job, as it has ended."""
    ended = [job for job in jobs if job.is_over]
    yield from ended
    waiting = [job for job in jobs if job not in ended]
    running: list[tuple[_Job, float]] = []
    while waiting or running:
        ended = [job for job, _ in running if job.is_over]
        yield from ended
        running = [(job, since) for job, since in running if job not in ended]
        for job, since in running:
            if time.monotonic() - since > timeout:
                job.stop()
        for job in list(waiting):
            if len(running) < at_a_time and job.gpu not in {other.gpu for other, _ in running}:
                job.token.with_suffix(".go").touch()
                waiting.remove(job)
                running.append((job, time.monotonic()))
        time.sleep(_POLL_SECONDS)
