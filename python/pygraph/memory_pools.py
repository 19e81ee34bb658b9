"""When PyTorch's memory pools can be freed.

A pool's destructor gives the pool's memory back to the device, which PyTorch 2.11 refuses while any
thread allocates from a pool or captures, and an exception in a destructor ends the process. So pools
wait here until nobody does.
"""

from __future__ import annotations

import torch

from pygraph import runtime

to_be_freed: list[torch.cuda.MemPool] = []


def free(device: int) -> None:
    """Frees the pools that nobody else holds, if no thread uses a pool of the device just now."""
    if to_be_freed and _none_in_use(device):
        to_be_freed.clear()


def _none_in_use(device: int) -> bool:
    """Asks PyTorch to give an empty pool's memory back, which it refuses or not, in the same way."""
    probe = torch.cuda.graph_pool_handle()
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, probe)
    torch._C._cuda_endAllocateToPool(device, probe)
    torch._C._cuda_releasePool(device, probe)
    return bool(runtime.engine().can_free_pool(*probe))
