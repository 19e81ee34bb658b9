"""Device memory that a variant takes, in a process where others have run before.

Counted is what the process has in use on the device (where NVML does not say, what all have): graphs
and libraries count too, and the stand-ins of PyGraph's recordings, which take no memory, do not,
unlike in PyTorch's own statistics. PyTorch keeps what it has taken, so what is in use is the peak
since it last gave memory back; where it may have given back in between, :class:`Peak` looks all the
time.

It cannot give back all: a segment in which one small tensor lives stays. What is free in such a
segment is nobody's. A later variant that fits its tensors there takes less new memory than it uses, and
one that does not is not to blame for it. So what counts is the new memory, and of the old as much as it
must have used: what PyTorch had allocated at most, beyond the new segments.
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
