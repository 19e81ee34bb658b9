"""Device memory that a variant takes, in a process where others have run before.

Counted is what the whole device has in use: graphs and libraries count too, and the stand-ins of
PyGraph's recordings, which take no memory, do not, unlike in PyTorch's own statistics. PyTorch keeps
what it has taken, so what is in use is the peak since it last gave memory back.

It cannot give back all: a segment in which one small tensor lives stays. What is free in such a
segment is nobody's. A later variant that fits its tensors there takes less new memory than it uses, and
one that does not is not to blame for it. So what counts is the new memory, and of the old as much as it
must have used: what PyTorch had allocated at most, beyond the new segments.
"""

from __future__ import annotations

import dataclasses

import torch


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


def used_since(before: Mark) -> float:
    """In MiB, since the mark, or since :func:`restart`."""
    reserved = torch.cuda.max_memory_reserved() / 2**20 - before.reserved
    allocated = torch.cuda.max_memory_allocated() / 2**20 - before.allocated
    return device_mib() - before.device + min(before.kept, max(0.0, allocated - reserved))


def restart() -> None:
    """Gives back what can be; the peak counts from here."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def device_mib() -> float:
    """In use on the device, whoever uses it."""
    torch.cuda.synchronize()
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
