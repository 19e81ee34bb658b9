"""The CPU that others disturb least, for what is timed on the host.

Two virtual CPUs share a core (SMT), and the other one may belong to a neighbour's machine on the same
host. While it works, a loop of Python took 1.5 to 2 times as long on a machine with 16 CPUs, which
neither the load nor the stolen time showed. So each block of timed calls is made on a CPU on which such
a loop is fast, and made again elsewhere if the loop has become slow by the block's end, or if another
thread has run on the CPU meanwhile. The block's own time decides nothing.

Only the calling thread is bound. Work that a block leaves to other threads, such as an uncaptured
backward, runs where it would.
"""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Callable
from typing import TypeVar

_LOOPS, _ITERATIONS = 3, 4000  # some 0.1 ms each
_QUIET, _STILL_QUIET = 1.1, 1.25  # times the least that the loop has taken
_MOST_SWITCHES = 2  # to threads of the kernel, while a block is made
_TRIES = 4
_T = TypeVar("_T")


def _seconds() -> float:
    """What the loop takes on this CPU: the least of a few."""
    least = float("inf")
    for _ in range(_LOOPS):
        start = time.perf_counter()
        count = 0
        for i in range(_ITERATIONS):
            count += i
        least = min(least, time.perf_counter() - start)
    return least


def _switches() -> int:
    """How often another thread has taken the CPU from this one."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


class QuietCpu:
    """Makes blocks on quiet CPUs, of those that the calling thread may use."""

    def __init__(self, seconds: Callable[[], float] = _seconds) -> None:
        self._seconds = seconds
        self._least = float("inf")
        self._last = -1  # the CPU of the last block
        self._disturbed = 0

    def make(self, block: Callable[[], _T]) -> _T:
        """The block's result. The thread is bound to one CPU meanwhile; threads that the block starts
        stay bound to it."""
        allowed = os.sched_getaffinity(0)
        if not _may_bind(allowed):
            self._disturbed += 1
            return block()
        try:
            for _ in range(_TRIES):
                is_quiet = self._move(allowed)
                switches = _switches()
                result = block()
                is_alone = _switches() - switches <= _MOST_SWITCHES
                if is_quiet and is_alone and self._seconds() <= _STILL_QUIET * self._least:
                    return result
                self._last = -1
        finally:
            os.sched_setaffinity(0, allowed)
        self._disturbed += 1
        return result

    def take_disturbed(self) -> int:
        """How many blocks were kept, since it was asked last, though their CPU did not stay quiet."""
        disturbed, self._disturbed = self._disturbed, 0
        return disturbed

    def _move(self, allowed: set[int]) -> bool:
        """To the CPU of the last block if it is quiet, else to the first quiet one. False if none is;
        then to the quietest."""
        order = random.sample(sorted(allowed), len(allowed))
        order.sort(key=lambda cpu: cpu != self._last)
        found: dict[int, float] = {}
        for cpu in order:
            os.sched_setaffinity(0, {cpu})
            found[cpu] = self._seconds()
            if found[cpu] <= _QUIET * self._least < float("inf"):
                break
        self._last = min(found, key=found.__getitem__)
        least, self._least = self._least, min(self._least, found[self._last])
        is_quiet = found[self._last] <= _QUIET * least
        if not is_quiet:  # all have been looked at: they may be slow for good
            self._least = found[self._last]
        os.sched_setaffinity(0, {self._last})
        return is_quiet


def _may_bind(cpus: set[int]) -> bool:
    """Whether the calling thread may be bound. Containers may forbid it."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        return False
    return True
