// Functions of PyTorch's CUDA library, without its headers, which need a toolkit. The extension
// also loads without the library.
#pragma once

#include "pygraph/cuda_abi.h"

namespace pygraph::bindings::torch_cuda {

// A function by its mangled name; null if this PyTorch does not export it. Throws
// std::runtime_error if libtorch_cuda is not loaded.
void* find_function(const char* name);

// PyTorch's current stream of the device. Throws std::runtime_error if libtorch_cuda is not loaded.
CUstream current_stream(int device);

// Whether work on the current stream would be captured (or refused, because of a capture
// elsewhere).
bool is_capturing(int device);

}  // namespace pygraph::bindings::torch_cuda
