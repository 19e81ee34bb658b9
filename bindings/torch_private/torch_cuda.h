// Functions of PyTorch's CUDA library, without its headers, which need a toolkit.
#pragma once

#include "pygraph/cuda_abi.h"

namespace pygraph::bindings::torch_cuda {

// PyTorch's current stream of the device. Throws std::runtime_error if libtorch_cuda is not loaded.
CUstream current_stream(int device);

// Whether work on the current stream would be captured (or refused, because of a capture
// elsewhere).
bool is_capturing(int device);

}  // namespace pygraph::bindings::torch_cuda
