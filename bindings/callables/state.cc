#include "callables/state.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "record/operator_schema.h"
#include "tensors/outputs.h"

namespace pygraph::bindings {
namespace {

bool has_memory(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && is_plain(tensor) && tensor.storage().nbytes() > 0;
}

const c10::StorageImpl* memory_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

// From its first byte to the end of its last one; what lies in between may be another tensor's.
std::pair<const char*, const char*> range_of(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto* first = static_cast<const char*>(tensor.const_data_ptr());
  return {first, first + (last + 1) * static_cast<int64_t>(tensor.itemsize())};
}

}  // namespace

at::Tensor flat_tensor(const c10::Storage& storage, c10::ScalarType dtype) {
  const auto type = c10::scalarTypeToTypeMeta(dtype);
  const auto count = static_cast<int64_t>(storage.nbytes() / type.itemsize());
  // Bytes that are no whole element would not be covered.
  if (count * type.itemsize() != storage.nbytes()) return flat_tensor(storage, c10::kByte);
  return make_tensor(storage, type, {count}, {1}, 0, {});
}

State::State(const CallObserver& observer, const std::vector<at::Tensor>& reachable,
             const std::vector<at::Tensor>& excluded, c10::Device device) {
  std::unordered_set<const c10::StorageImpl*> left_out;
  for (const at::Tensor& tensor : excluded) {
    if (has_memory(tensor)) left_out.insert(memory_of(tensor));
  }
  for (const at::Tensor& tensor : reachable) {
    if (tensor.device() == device && has_memory(tensor) && !left_out.contains(memory_of(tensor))) {
      add(tensor);
    }
  }
  for (const SeenStorage& seen : observer.storages()) {
    if (seen.is_born || seen.device != device) continue;
    const c10::Storage storage(seen.storage.lock());
    if (storage && (storage.nbytes() == 0 || left_out.contains(storage.unsafeGetStorageImpl()))) {
      continue;
    }
    bool is_owned = false;
    for (const WeakTensor& weak : seen.tensors) {
      const at::Tensor owner(weak.lock());
      if (!owner.defined() || memory_of(owner) != storage.unsafeGetStorageImpl()) continue;
      add(owner);
      is_owned = true;
    }
    const auto found = index_.find(storage.unsafeGetStorageImpl());
    is_owned |= storage && found != index_.end();
    if (!is_owned) {
      unowned_ = seen.user;
    } else {
      items_[found->second].is_written |= seen.is_written;
    }
  }
}

void State::add(const at::Tensor& tensor) {
  const auto [entry, is_new] = index_.emplace(memory_of(tensor), tensors_.size());
  if (is_new) {
    tensors_.push_back(flat_tensor(tensor.storage(), tensor.scalar_type()));
    items_.emplace_back();
  }
  add_owner(items_[entry->second], WeakTensor(tensor.getIntrusivePtr()));
}

void State::add_owner(Item& item, const WeakTensor& owner) {
  const auto is_it = [&](const WeakTensor& known) {
    return known._unsafe_get_target() == owner._unsafe_get_target();
  };
  if (std::ranges::none_of(item.owners, is_it)) item.owners.push_back(owner);
}

bool State::is_valid() const {
  for (size_t i = 0; i < items_.size(); ++i) {
    bool is_owned = false;
    const c10::StorageImpl* memory = memory_of(tensors_[i]);
    for (const WeakTensor& weak : items_[i].owners) {
      if (weak.expired()) continue;
      const c10::TensorImpl* owner = weak._unsafe_get_target();
      if (!owner->has_storage() || owner->unsafe_storage().unsafeGetStorageImpl() != memory) {
        return false;
      }
      is_owned = true;
    }
    if (!is_owned) return false;
  }
  return true;
}

bool State::is_shared_by(const std::vector<at::Tensor>& tensors) const {
  std::vector<std::pair<const char*, const char*>> ranges;  // of bytes: first, end
  ranges.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    if (!has_memory(tensor)) continue;
    if (index_.contains(memory_of(tensor))) return true;
    if (tensor.numel() > 0) ranges.push_back(range_of(tensor));
  }
  std::ranges::sort(ranges);
  return std::ranges::adjacent_find(ranges, [](const auto& a, const auto& b) {
           return b.first < a.second;
         }) != ranges.end();
}

void State::bump_versions(const std::vector<uint32_t>& positions) const {
  const auto bump = [](const Item& item) {
    for (const WeakTensor& weak : item.owners) {
      if (weak.expired()) continue;
      c10::TensorImpl* owner = weak._unsafe_get_target();
      if (!owner->is_inference()) owner->bump_version();
    }
  };
  for (const Item& item : items_) {
    if (item.is_written) bump(item);
  }
  for (const uint32_t position : positions) {
    if (!items_.at(position).is_written) bump(items_[position]);
  }
}

}  // namespace pygraph::bindings
