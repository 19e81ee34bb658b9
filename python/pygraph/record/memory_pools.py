"""The memory pools of recordings, and when their memory is released.

Each recording has a pool of its own, with addresses in place of memory. PyTorch 2.11 can release a
pool's memory only while no thread allocates from a pool or captures. The pool's destructor tries at
once, and an exception there ends the process. So pools are never destroyed, not even when the process
ends (some 100 bytes each). Their memory is released here, as soon as PyTorch allows it.

Not thread-safe: only the thread that records uses it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from pygraph import runtime

_devices: dict[tuple[int, int], int] = {}  # of pools that are not released
_waiting: dict[tuple[int, int], None] = {}  # the released ones that still have memory


def make() -> torch.cuda.MemPool:
    """Makes a pool for one recording, on the current device."""
    pool = torch.cuda.MemPool(_allocator())
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
    _devices[pool.id] = torch.cuda.current_device()
    return pool


def release(pool: torch.cuda.MemPool) -> None:
    """To be called when nothing allocates from the pool or holds memory of it. May be called again
    after an interrupt: PyTorch must not be told twice."""
    device = _devices.get(pool.id)
    if device is None:
        return
    if pool.use_count() > 0:
        torch._C._cuda_releasePool(device, pool.id)
    _waiting[pool.id] = None
    del _devices[pool.id]


def are_in_use() -> bool:
    """Whether any thread captures, or allocates from a pool: PyTorch frees no pool meanwhile, so an
    empty one shows it."""
    probe = make()
    release(probe)
    if not runtime.engine().free_pool(*probe.id):
        return True
    _waiting.pop(probe.id, None)
    return False


def free() -> None:
    """Releases the memory of released pools, if no thread uses a pool now."""
    while _waiting and runtime.engine().free_pool(*next(iter(_waiting))):
        del _waiting[next(iter(_waiting))]


def _allocator() -> Any:
    """The allocator of bindings/record/allocation_log.h, one object per recording.

    PyTorch's wrapper stores allocations by address, and another recording may use the same addresses
    before those of this one are released.
    """
    library = runtime.engine().__file__
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        library, "pygraph_record_allocate", "pygraph_record_free"
    )
    return allocator.allocator()  # type: ignore[no-untyped-call]
