// Operators that PyGraph's code transformations put into programs. None waits for the GPU, and the
// caller may change the CPU tensors as soon as the call returns.
//
//   pygraph::to_device(Tensor host, Device device) -> Tensor
//     The CPU tensor on the GPU, with its order of dimensions, by an asynchronous copy through
//     pinned memory.
//   pygraph::scalars_to_device(Tensor[] scalars, Device device) -> Tensor
//     0-d CPU tensors of one dtype as one vector on the GPU, in one such copy.
//   pygraph::keep_on_cpu(Tensor x) -> Tensor
//     A copy of x. Marks a value that must stay on the CPU: Inductor moves constants that are
//     returned and numbers that the CPU goes on computing with to the GPU (PyTorch 2.11).
#pragma once

#include <ATen/core/Tensor.h>

namespace pygraph::bindings {

// Both throw c10::Error while the device's current stream is being captured. Thread-safe.
at::Tensor to_device(const at::Tensor& host, c10::Device device);
at::Tensor scalars_to_device(at::TensorList scalars, c10::Device device);

}  // namespace pygraph::bindings
