// PyTorch's allocator calls functions where no free piece of memory fits a request, before it takes
// new memory from the device (FreeMemoryCallback in c10/cuda/CUDACachingAllocator.h).
#pragma once

namespace pygraph::bindings::torch_cuda {

// Frees memory of the current device, and returns whether it freed any. Called by any thread that
// allocates, which holds the allocator's lock of that device, and maybe Python's: it must not free
// memory of other devices, nor wait for a thread that allocates or needs Python's lock.
using FreeMemory = bool (*)();

// Lets the allocator call `function` from now on; later calls have no effect. Returns whether this
// PyTorch can. To be called before other threads allocate: the allocator reads its list of
// functions without a lock.
bool free_where_memory_is_short(FreeMemory function);

}  // namespace pygraph::bindings::torch_cuda
