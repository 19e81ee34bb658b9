#include "ops.h"

#include <ATen/Functions.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <mutex>

#include "torch_cuda.h"

namespace pygraph {
namespace {

// Smaller constants are copied along with everything else: that costs less than looking them up.
constexpr uint64_t kSmallestKept = uint64_t{64} << 10;

// GPU copies of large constants, as long as the constants live. Thread-safe.
class ConstantCache {
 public:
  // Nothing if the tensor is not one whose changes PyTorch counts.
  std::optional<at::Tensor> find_or_copy(const at::Tensor& host, c10::Device device) {
    if (host.nbytes() < kSmallestKept || host.is_inference() || !is_own_memory(host)) return {};
    const auto version = host._version();
    const std::lock_guard lock(mutex_);
    std::erase_if(entries_, [](const auto& item) { return item.second.host.expired(); });
    Entry& entry = entries_[{host.unsafeGetTensorImpl(), device}];
    if (!entry.copy.defined() || entry.version != version || entry.data != host.const_data_ptr()) {
      entry.host = host.getIntrusivePtr();
      entry.version = version;
      entry.data = host.const_data_ptr();
      entry.copy = host.to(device, host.scalar_type(), /*non_blocking=*/false, /*copy=*/true,
                           at::MemoryFormat::Contiguous);
    }
    // It may be replaced while another stream than the one it was made on still reads it.
    if (device.is_cuda()) {
      const c10::impl::VirtualGuardImpl guard(device.type());
      entry.copy.record_stream(guard.getStream(device));
    }
    return entry.copy;
  }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<at::TensorImpl> host{c10::intrusive_ptr<at::TensorImpl>()};
    int64_t version = 0;
    const void* data = nullptr;
    at::Tensor copy;
  };
  struct Key {
    const at::TensorImpl* tensor;
    c10::Device device;
    bool operator<(const Key& other) const {
      return std::pair(tensor, device.index()) < std::pair(other.tensor, other.device.index());
    }
  };

  // A tensor on another library's memory (NumPy's) changes without a count.
  static bool is_own_memory(const at::Tensor& host) {
    return host.storage().data_ptr().get_deleter() == c10::GetCPUAllocator()->raw_deleter();
  }

  std::mutex mutex_;
  std::map<Key, Entry> entries_;
};

ConstantCache& constant_cache() {
  static auto* cache = new ConstantCache;  // never destroyed: the driver may be gone by then
  return *cache;
}

at::Tensor staging_like(at::IntArrayRef sizes, const at::Tensor& like, c10::Device device) {
  return at::empty(sizes, like.options().pinned_memory(device.is_cuda()));
}

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

at::Tensor to_device(const at::Tensor& host, c10::Device device, bool constant) {
  check_not_capturing(device);
  if (constant) {
    // A copy on the GPU, as compiled code may reuse the memory of what it gets.
    if (auto kept = constant_cache().find_or_copy(host, device)) return kept->clone();
  }
  const at::Tensor staging = staging_like(host.sizes(), host, device);
  staging.copy_(host);
  return send(staging, device);
}

at::Tensor scalars_to_device(at::TensorList scalars, c10::Device device) {
  check_not_capturing(device);
  const auto count = static_cast<int64_t>(scalars.size());
  const at::Tensor staging = staging_like({count}, scalars[0], device);
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

}  // namespace pygraph

TORCH_LIBRARY(pygraph, m) {
  m.def("to_device(Tensor host, Device device, bool constant) -> Tensor");
  m.def("scalars_to_device(Tensor[] scalars, Device device) -> Tensor");
  m.def("keep_on_cpu(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(pygraph, CPU, m) {
  m.impl("to_device", &pygraph::to_device);
  m.impl("scalars_to_device", &pygraph::scalars_to_device);
  m.impl("keep_on_cpu", &pygraph::keep_on_cpu);
}
