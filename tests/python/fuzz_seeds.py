"""Seeds of the fuzzer for tests of how it runs programs."""

from __future__ import annotations

import functools

from tests.fuzz.check import check
from tests.fuzz.generate import generate
from tests.fuzz.partition_level import direct


@functools.cache
def three_that_run() -> int:
    """The first of three seeds, one after the other, of which every call returns, with results of a
    partition."""
    return next(seed for seed in range(1, 100) if all(_runs(seed + i) for i in range(3)))


def _runs(seed: int) -> bool:
    program = generate(seed, "partition")
    return len(program.calls) > 2 and check(program, "cpu", direct).raised == 0
