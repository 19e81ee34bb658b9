"""Background loads for the GPU, which change when other kernels run and what runs at the same time."""

from __future__ import annotations

import functools

import torch

from pygraph import runtime
from pygraph.gpu import current
from pygraph.undoing import Undo, undoing

_SLEEP_CLOCK_HZ = 2e9  # at least any GPU's; a longer sleep than needed does no harm
_LONGEST = 0.1  # seconds; whatever takes longer to issue has gaps that do not matter
_ELEMENTS = 1 << 23  # in single precision
_SECONDS_PER_KERNEL = 3e-5  # about, on an H100


def keep_busy(seconds: float) -> None:
    """Makes the current stream wait for ``seconds`` (at most 0.1), so that work that is issued
    meanwhile runs without gaps."""
    if seconds > 0:
        torch.cuda._sleep(int(min(seconds, _LONGEST) * _SLEEP_CLOCK_HZ))  # type: ignore[no-untyped-call]


def disturb(seconds: float) -> None:
    """Makes another stream compute for about ``seconds`` (at most 0.1). Takes 64 MiB meanwhile.

    Other kernels then get multiprocessors at other times and in another order, and so do their atomic
    additions. The load is elementwise: a product of matrices would do as well, but would leave cuBLAS
    loaded (some 70 MiB) in programs that never use it.
    """
    # Memory of the current stream, which others can use again afterwards.
    a, b = (torch.ones(_ELEMENTS, device="cuda", dtype=torch.float32) for _ in range(2))
    side = side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())

    def compute(undo: Undo) -> None:
        for tensor in (a, b):
            undo.append(functools.partial(tensor.record_stream, side))
        current.use_stream(side, undo)
        for _ in range(10 + int(min(seconds, _LONGEST) / _SECONDS_PER_KERNEL)):
            torch.lgamma(a, out=b)

    undoing(compute)


def wait_for_loads() -> None:
    """Makes the current stream wait until no :func:`disturb` computes any more."""
    torch.cuda.current_stream().wait_stream(side_stream(torch.cuda.current_device()))


@functools.cache
def side_stream(device: int) -> torch.cuda.Stream:
    """A stream that nothing else uses, for captures and background loads.

    Not one of PyTorch's, which are reused: memory that an operator keeps for the stream of a recording
    must not be used on a stream of the program.
    """

    def make(undo: Undo) -> torch.cuda.Stream:
        current.use_device(device, undo)
        return torch.cuda.ExternalStream(runtime.engine().new_stream(), device)  # type: ignore[no-untyped-call]

    return undoing(make)
