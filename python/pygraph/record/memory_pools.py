"""The memory pools of recordings, and when their memory goes back.

Each recording has a pool of its own, whose memory is addresses without contents. PyTorch 2.11 gives a
pool's memory back only while no thread allocates from a pool or captures; in the pool's destructor it
tries at once, and an exception there ends the process. So pools are never destroyed, not even when the
process ends (some 100 bytes each), and what their destructor does is done here, as soon as PyTorch
allows it.

Not thread-safe: only the thread that records uses it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from pygraph import runtime

_devices: dict[tuple[int, int], int] = {}  # of pools that are not released
_waiting: list[tuple[int, int]] = []  # the released ones that still have memory, by their numbers


def make() -> torch.cuda.MemPool:
    """A pool for one recording, on the current device."""
    pool = torch.cuda.MemPool(_allocator())
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
    _devices[pool.id] = torch.cuda.current_device()
    return pool


def release(pool: torch.cuda.MemPool) -> None:
    """Nobody allocates from the pool any more, or holds memory of it."""
    torch._C._cuda_releasePool(_devices.pop(pool.id), pool.id)
    _waiting.append(pool.id)


def free() -> None:
    """Gives the memory of released pools back, if no thread uses a pool just now."""
    while _waiting and runtime.engine().free_pool(*_waiting[-1]):
        _waiting.pop()


def _allocator() -> Any:
    """The one in bindings/record/allocation_log.h. PyTorch's wrapper notes allocations by address, and
    another recording may have the same addresses before this one's are given back: each has its own."""
    library = runtime.engine().__file__
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        library, "pygraph_record_allocate", "pygraph_record_free"
    )
    return allocator.allocator()  # type: ignore[no-untyped-call]
