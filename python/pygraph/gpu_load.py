"""Work for the GPU that changes when, and beside what, other kernels run."""

from __future__ import annotations

import functools

import torch

_SLEEP_CLOCK_HZ = 2e9  # at least any GPU's; a longer sleep than needed does no harm
_LONGEST = 0.1  # seconds; whatever takes longer to issue has gaps that do not matter
_SIDE = 2048  # of the matrices
_SECONDS_PER_PRODUCT = 3e-4  # about, in single precision, on an H100


def keep_busy(seconds: float) -> None:
    """Makes the current stream wait for so long; what is issued meanwhile then runs without gaps.

    At most 0.1 s.
    """
    if seconds > 0:
        torch.cuda._sleep(int(min(seconds, _LONGEST) * _SLEEP_CLOCK_HZ))  # type: ignore[no-untyped-call]


def disturb(seconds: float) -> None:
    """Has another stream multiply matrices for about so long, at most 0.1 s; takes 32 MiB meanwhile.

    Kernels that run meanwhile get their multiprocessors at other times and in another order, and
    where they add by atomics, so do these. Does nothing where the program wants deterministic
    algorithms only: then nothing adds by atomics, and the product may be an error.
    """
    if torch.are_deterministic_algorithms_enabled():
        return
    with torch.cuda.stream(side_stream(torch.cuda.current_device())):
        a, b = (torch.ones(_SIDE, _SIDE, device="cuda") for _ in range(2))
        for _ in range(10 + int(min(seconds, _LONGEST) / _SECONDS_PER_PRODUCT)):
            torch.mm(a, a, out=b)


@functools.cache
def side_stream(device: int) -> torch.cuda.Stream:
    """A stream that nobody else uses, for captures and for work beside the program's."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
