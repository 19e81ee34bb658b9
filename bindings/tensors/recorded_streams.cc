#include "tensors/recorded_streams.h"

#include <ATen/RedispatchFunctions.h>
#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

namespace pygraph::bindings {
namespace {

// By address, which is not reused while a weak reference exists.
class Noted {
 public:
  void add(const c10::Storage& storage) {
    const std::lock_guard lock(mutex_);
    if (storages_.size() >= limit_) {
      std::erase_if(storages_, [](const auto& entry) { return entry.second.expired(); });
      limit_ = 2 * storages_.size() + kFewest;
    }
    storages_.emplace(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
    is_empty_.store(false, std::memory_order_release);
  }
  bool contains(const c10::StorageImpl* storage) {
    if (is_empty_.load(std::memory_order_acquire)) return false;
    const std::lock_guard lock(mutex_);
    return storages_.contains(storage);
  }

 private:
  static constexpr size_t kFewest = 256;
  std::atomic<bool> is_empty_ = true;
  std::mutex mutex_;
  size_t limit_ = kFewest;
  std::unordered_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
};

Noted& noted() {
  static auto* noted = new Noted;  // never destroyed: tensors may outlive static objects
  return *noted;
}

// BackendSelect is among the keys of every call, below those of autograd and of tensor subclasses
// and above the backends', and the operator has no kernel there.
void record_stream(c10::DispatchKeySet keys, at::Tensor& self, c10::Stream stream) {
  if (self.has_storage()) noted().add(self.storage());
  constexpr auto kBelow =
      c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
  at::redispatch::record_stream(keys & kBelow, self, stream);
}

}  // namespace

bool is_used_by_other_streams(const c10::StorageImpl* storage) {
  return noted().contains(storage);
}

}  // namespace pygraph::bindings

TORCH_LIBRARY_IMPL(aten, BackendSelect, m) {
  m.impl("record_stream", &pygraph::bindings::record_stream);
}
