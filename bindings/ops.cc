// Operators that PyGraph's code transformations put into programs.
//
//   pygraph::to_device(Tensor[] hosts, Device device, int[] constant) -> Tensor[]
//     The CPU tensors on the GPU, in one asynchronous copy through pinned memory: nothing waits for
//     the GPU, and the caller may change the tensors as soon as the call returns. The results are
//     contiguous views of one block. `constant` are positions of tensors that belong to a module:
//     where such a tensor is large it is copied only when it has changed.
//   pygraph::keep_on_cpu(Tensor x) -> Tensor
//     A copy of x. Marks a value that the user gets on the CPU, as Inductor moves constants that
//     are returned to the GPU (PyTorch 2.11).
#include <ATen/Functions.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <map>
#include <mutex>

namespace pygraph {
namespace {

constexpr int64_t kAlignment = 256;
// Smaller constants are copied along with everything else: that costs less than looking them up.
constexpr uint64_t kSmallestKept = uint64_t{64} << 10;

int64_t align_up(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

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
    if (!entry.copy.defined() || entry.version != version || entry.data != host.data_ptr()) {
      entry.host = host.getIntrusivePtr();
      entry.version = version;
      entry.data = host.data_ptr();
      entry.copy = host.contiguous().to(device);
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

std::vector<at::Tensor> to_device(at::TensorList hosts, c10::Device device,
                                  at::IntArrayRef constant) {
  std::vector<at::Tensor> results(hosts.size());
  for (const int64_t i : constant) {
    // A copy on the GPU, as compiled code may reuse the memory of what it gets.
    if (auto kept = constant_cache().find_or_copy(hosts[i], device)) results[i] = kept->clone();
  }
  int64_t total = 0;
  std::vector<int64_t> offsets(hosts.size());
  for (size_t i = 0; i < hosts.size(); ++i) {
    offsets[i] = total;
    if (!results[i].defined()) total += align_up(static_cast<int64_t>(hosts[i].nbytes()));
  }
  const auto bytes = at::TensorOptions().dtype(at::kByte);
  const at::Tensor staging = at::empty({total}, bytes.pinned_memory(device.is_cuda()));
  const auto part = [&](const at::Tensor& block, size_t i) {
    const at::Tensor& like = hosts[i];
    return block.narrow(0, offsets[i], static_cast<int64_t>(like.nbytes()))
        .view(like.scalar_type())
        .view(like.sizes());
  };
  for (size_t i = 0; i < hosts.size(); ++i) {
    if (!results[i].defined()) part(staging, i).copy_(hosts[i]);
  }
  // PyTorch's allocator of pinned memory hands the block out again only after the copy.
  const at::Tensor block = staging.to(device, /*non_blocking=*/true);
  for (size_t i = 0; i < hosts.size(); ++i) {
    if (!results[i].defined()) results[i] = part(block, i);
  }
  return results;
}

at::Tensor keep_on_cpu(const at::Tensor& x) {
  return x.clone();
}

}  // namespace
}  // namespace pygraph

TORCH_LIBRARY(pygraph, m) {
  m.def("to_device(Tensor[] hosts, Device device, int[] constant) -> Tensor[]");
  m.def("keep_on_cpu(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(pygraph, CPU, m) {
  m.impl("to_device", &pygraph::to_device);
  m.impl("keep_on_cpu", &pygraph::keep_on_cpu);
}
