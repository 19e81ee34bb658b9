#include "tensors/operators.h"

#include <ATen/Functions.h>
#include <torch/library.h>

#include <cstring>

#include "torch_private/torch_cuda.h"

namespace pygraph::bindings {
namespace {

// PyTorch's allocator of pinned memory hands the staging block out again only after the copy.
at::Tensor send(const at::Tensor& staging, c10::Device device) {
  return staging.to(device, /*non_blocking=*/true);
}

// A captured copy would read the staging block at every replay, long after it was handed out again.
void check_not_capturing(c10::Device device) {
  TORCH_CHECK(!device.is_cuda() || !torch_cuda::is_capturing(device.index()),
              "cannot copy a CPU tensor to the GPU while a CUDA graph is being captured: its value "
              "would be frozen. Move it to the GPU before the capture.");
}

at::Tensor keep_on_cpu(const at::Tensor& x) {
  return x.clone();
}

}  // namespace

at::Tensor to_device(const at::Tensor& host, c10::Device device) {
  check_not_capturing(device);
  const auto options = host.options().pinned_memory(device.is_cuda());
  const at::Tensor staging = at::empty_like(host, options, at::MemoryFormat::Preserve);
  staging.copy_(host);
  return send(staging, device);
}

at::Tensor scalars_to_device(at::TensorList scalars, c10::Device device) {
  check_not_capturing(device);
  const auto count = static_cast<int64_t>(scalars.size());
  const at::Tensor staging =
      at::empty({count}, scalars[0].options().pinned_memory(device.is_cuda()));
  const size_t size = staging.itemsize();
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK(scalars[i].dim() == 0 && scalars[i].dtype() == staging.dtype(),
                "pygraph::scalars_to_device takes 0-d tensors of one dtype");
    const at::Tensor plain = scalars[i].resolve_conj().resolve_neg();
    std::memcpy(static_cast<std::byte*>(staging.mutable_data_ptr()) + i * size,
                plain.const_data_ptr(), size);
  }
  return send(staging, device);
}

}  // namespace pygraph::bindings

TORCH_LIBRARY(pygraph, m) {
  m.def("to_device(Tensor host, Device device) -> Tensor");
  m.def("scalars_to_device(Tensor[] scalars, Device device) -> Tensor");
  m.def("keep_on_cpu(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(pygraph, CPU, m) {
  m.impl("to_device", &pygraph::bindings::to_device);
  m.impl("scalars_to_device", &pygraph::bindings::scalars_to_device);
  m.impl("keep_on_cpu", &pygraph::bindings::keep_on_cpu);
}
