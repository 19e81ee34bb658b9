"""Device memory that a variant takes, in a process in which others have run before.

Measured is the memory that the process uses on the device (if NVML does not report it, the memory that
all processes use). That includes graphs and libraries, and, unlike PyTorch's own statistics, excludes
the stand-ins of PyGraph's recordings, which take no memory. PyTorch keeps memory that it has taken, so
the memory in use is the peak since PyTorch last released any. Where it may have released some in
between, :class:`Peak` samples continuously.

PyTorch cannot release everything: a segment with one small tensor in it stays. A later variant whose
tensors fit into the free part of such a segment takes less new memory than it uses; one whose tensors
do not fit must not be charged for the segment. So a variant's memory is the new memory, plus the part
of the old segments that it must have used: PyTorch's peak of allocated memory, beyond the new segments.
"""

from __future__ import annotations

import dataclasses
import threading
from types import TracebackType

import torch

from benchmarks.nvml import process_mib

_SECONDS_PER_LOOK = 0.005


@dataclasses.dataclass(frozen=True)
class Mark:
    """Memory at a moment, in MiB."""

    device: float  # in use on the device
    reserved: float  # by PyTorch
    allocated: float  # of that, by tensors and graphs
    kept: float  # reserved, free, and not to be given back


def mark() -> Mark:
    """Now, after PyTorch gave back what it could; its peak counts from here."""
    torch.cuda.reset_peak_memory_stats()
    return Mark(
        device_mib(),
        torch.cuda.memory_reserved() / 2**20,
        torch.cuda.memory_allocated() / 2**20,
        _kept(),
    )


class Peak:
    """The most that was in use while this context was entered, looked at every few milliseconds.

    Where NVML does not say: what was in use at its end.
    """

    def __init__(self) -> None:
        self.mib = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self.mib = max(self.mib, device_mib())

    def _look(self) -> None:
        while not self._is_over.wait(_SECONDS_PER_LOOK):
            self.mib = max(self.mib, process_mib() or 0.0)


def used_since(before: Mark, peak: Peak | None = None) -> float:
    """In MiB, since the mark, or since :func:`restart`: now, or at the peak."""
    reserved = torch.cuda.max_memory_reserved() / 2**20 - before.reserved
    allocated = torch.cuda.max_memory_allocated() / 2**20 - before.allocated
    in_use = device_mib() if peak is None else peak.mib
    return in_use - before.device + min(before.kept, max(0.0, allocated - reserved))


def restart() -> None:
    """Gives back what can be; the peak counts from here."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def device_mib() -> float:
    """In use on the device, by this process if that is known."""
    torch.cuda.synchronize()
    own = process_mib()
    if own is not None:
        return own
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


def in_use_mib() -> float:
    """The same without what PyTorch keeps for the next tensors; what graphs keep counts."""
    return device_mib() - _kept()


def _kept() -> float:
    return sum(
        (segment["total_size"] - segment["allocated_size"]) / 2**20
        for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        if segment["segment_pool_id"] == (0, 0)
    )
