"""The CPU that others disturb least, for what is timed on the host.

Two virtual CPUs share a core (SMT), and the other one may belong to a neighbour's machine on the same
host. While it works, a loop of Python takes 1.5 to 2 times as long here, which neither the load nor the
stolen time shows. So each block of timed calls is made on the CPU on which such a loop is fastest, and
made again if the loop has become slow by the block's end. The loop decides, never the block's own time.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import TypeVar

_LOOPS, _ITERATIONS = 3, 4000  # some 0.1 ms each
_QUIET, _STILL_QUIET = 1.1, 1.25  # times the least that the loop has taken in this process
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


class QuietCpu:
    """Makes blocks on quiet CPUs, of those that the calling thread may use."""

    def __init__(self, seconds: Callable[[], float] = _seconds) -> None:
        self._seconds = seconds
        self._least = float("inf")
        self._quietest = min(os.sched_getaffinity(0))
        self._disturbed = 0

    def make(self, block: Callable[[], _T]) -> _T:
        """The block's result. The thread is bound to one CPU meanwhile; threads that it starts, too."""
        allowed = os.sched_getaffinity(0)
        try:
            for _ in range(_TRIES):
                self._move(allowed)
                result = block()
                if self._here() <= _STILL_QUIET * self._least:
                    return result
        finally:
            os.sched_setaffinity(0, allowed)
        self._disturbed += 1
        return result

    def take_disturbed(self) -> int:
        """How many blocks were kept, since it was asked last, though their CPU did not stay quiet."""
        disturbed, self._disturbed = self._disturbed, 0
        return disturbed

    def _here(self) -> float:
        seconds = self._seconds()
        self._least = min(self._least, seconds)
        return seconds

    def _move(self, allowed: set[int]) -> None:
        """To the CPU of the last block if it is still quiet, else to the first quiet one, else to the
        quietest."""
        others = sorted(allowed - {self._quietest})
        random.shuffle(others)
        found: dict[int, float] = {}
        is_first = self._least == float("inf")  # nothing to compare with
        for cpu in [self._quietest, *others]:
            os.sched_setaffinity(0, {cpu})
            found[cpu] = self._here()
            if not is_first and found[cpu] <= _QUIET * self._least:
                break
        self._quietest = min(found, key=found.__getitem__)
        os.sched_setaffinity(0, {self._quietest})
