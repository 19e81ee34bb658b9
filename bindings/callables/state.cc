#include "callables/state.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "record/operator_schema.h"
#include "tensors/arguments.h"
#include "tensors/outputs.h"
#include "tensors/prefetch.h"

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
  const auto* first = static_cast<const char*>(tensor.const_data_ptr());
  return {first, first + extent_of(tensor)};
}

// Where the tensor's version is counted, to be asked for; not to be followed.
const void* counter_of(const c10::TensorImpl* tensor) {
  const c10::VariableVersion& version = tensor->version_counter();
  static_assert(sizeof version == sizeof(const void*));
  return *reinterpret_cast<const void* const*>(&version);
}

bool overlap(const pybind11::list& tensors) {
  std::vector<std::pair<const char*, const char*>> ranges;
  for (const pybind11::handle object : tensors) {
    const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
    if (has_memory(tensor) && tensor.numel() > 0) ranges.push_back(range_of(tensor));
  }
  std::ranges::sort(ranges);
  const auto starts_before_end = [](const auto& a, const auto& b) { return b.first < a.second; };
  return std::ranges::adjacent_find(ranges, starts_before_end) != ranges.end();
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
  std::vector<Item> items;  // by tensor
  std::unordered_set<const c10::StorageImpl*> left_out;
  for (const at::Tensor& tensor : excluded) {
    if (has_memory(tensor)) left_out.insert(memory_of(tensor));
  }
  for (const at::Tensor& tensor : reachable) {
    if (tensor.device() == device && has_memory(tensor) && !left_out.contains(memory_of(tensor))) {
      add(tensor, true, items);
    }
  }
  for (const SeenStorage& seen : observer.storages()) {
    if (seen.is_born || seen.device != device) continue;
    const c10::Storage storage(seen.storage.lock());
    if (storage && (storage.nbytes() == 0 || left_out.contains(storage.unsafeGetStorageImpl()))) {
      continue;
    }
    bool is_owned = false;
    for (const SeenTensor& through : seen.tensors) {
      const at::Tensor owner(through.tensor.lock());
      if (!owner.defined() || memory_of(owner) != storage.unsafeGetStorageImpl()) continue;
      add(owner, !through.version || through.version != version_of(owner), items);
      is_owned = true;
    }
    const auto found = index_.find(storage.unsafeGetStorageImpl());
    is_owned |= storage && found != index_.end();
    if (!is_owned) {
      unowned_ = seen.user;
    } else {
      items[found->second].is_written |= seen.is_written;
    }
  }
  keep(items);
}

void State::add(const at::Tensor& tensor, bool is_counted, std::vector<Item>& items) {
  const auto [entry, is_new] = index_.emplace(memory_of(tensor), tensors_.size());
  if (is_new) {
    tensors_.push_back(flat_tensor(tensor.storage(), tensor.scalar_type()));
    items.emplace_back();
  }
  add_owner(items[entry->second], {WeakTensor(tensor.getIntrusivePtr()), is_counted});
}

// Of a reachable tensor that operators were given, too, they tell.
void State::add_owner(Item& item, const ItsOwner& owner) {
  const auto is_it = [&](const ItsOwner& known) {
    return known.tensor._unsafe_get_target() == owner.tensor._unsafe_get_target();
  };
  const auto known = std::ranges::find_if(item.owners, is_it);
  if (known == item.owners.end()) {
    item.owners.push_back(owner);
  } else {
    known->is_counted = owner.is_counted;
  }
}

void State::keep(const std::vector<Item>& items) {
  memory_ = PointerSet(tensors_.size());
  for (size_t i = 0; i < items.size(); ++i) {
    const c10::StorageImpl* memory = memory_of(tensors_[i]);
    memory_.insert(memory);
    is_written_.push_back(items[i].is_written);
    first_owner_.push_back(owners_.size());
    for (const ItsOwner& owner : items[i].owners) {
      owners_.push_back({owner.tensor, memory, i});
      if (items[i].is_written && owner.is_counted) counted_.push_back(owner.tensor);
    }
  }
  first_owner_.push_back(owners_.size());
}

std::vector<uint32_t> State::written() const {
  std::vector<uint32_t> positions;
  for (uint32_t i = 0; i < is_written_.size(); ++i) {
    if (is_written_[i]) positions.push_back(i);
  }
  return positions;
}

void State::count(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    const auto is_it = [&](const WeakTensor& owner) {
      return owner._unsafe_get_target() == tensor.unsafeGetTensorImpl();
    };
    const auto owner = std::ranges::find_if(owners_, is_it, &Owner::tensor);
    if (owner == owners_.end() || !is_written_[owner->item]) continue;
    if (std::ranges::none_of(counted_, is_it)) counted_.push_back(owner->tensor);
  }
}

bool State::has_its_memory(const Owner& owner) {
  const c10::TensorImpl* tensor = owner.tensor._unsafe_get_target();
  return tensor->has_storage() && tensor->unsafe_storage().unsafeGetStorageImpl() == owner.memory;
}

bool State::is_valid() const {
  size_t owned = 0;  // storages
  size_t last = tensors_.size();
  constexpr size_t kAhead = 16;
  for (size_t i = 0; i < owners_.size(); ++i) {
    if (i + kAhead < owners_.size()) prefetch(owners_[i + kAhead].tensor._unsafe_get_target(), 1);
    const Owner& owner = owners_[i];
    if (owner.tensor.expired()) continue;
    if (!has_its_memory(owner)) return false;
    if (owner.item != last) ++owned;
    last = owner.item;
  }
  return owned == tensors_.size();
}

bool State::is_shared_by(const pybind11::list& tensors) const {
  PointerSet seen(tensors.size());
  bool share_storages = false;
  for (const pybind11::handle object : tensors) {
    const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
    if (!has_memory(tensor)) continue;
    if (memory_.contains(memory_of(tensor))) return true;
    share_storages |= !seen.insert(memory_of(tensor));
  }
  return share_storages && overlap(tensors);
}

// Of what a tensor holds, all that is read is in its first line. Its counter is behind it, and is
// increased by an instruction that waits for all reads before it: it must be there by then.
void State::prefetch_after(size_t i) const {
  constexpr size_t kAhead = 8;
  if (i + 2 * kAhead < counted_.size()) {
    prefetch(counted_[i + 2 * kAhead]._unsafe_get_target(), 1);
  }
  if (i + kAhead < counted_.size() && !counted_[i + kAhead].expired()) {
    prefetch(counter_of(counted_[i + kAhead]._unsafe_get_target()), 1);
  }
}

void State::bump(const WeakTensor& owner) {
  if (owner.expired()) return;
  c10::TensorImpl* tensor = owner._unsafe_get_target();
  // Inference tensors have no counter.
  if (tensor->version_counter().enabled()) tensor->bump_version();
}

void State::bump_versions(const pybind11::list& positions) const {
  for (size_t i = 0; i < counted_.size(); ++i) {
    prefetch_after(i);
    bump(counted_[i]);
  }
  for (const pybind11::handle position : positions) {
    const size_t item = PyLong_AsSize_t(position.ptr());
    if (is_written_.at(item)) continue;
    for (size_t i = first_owner_[item]; i < first_owner_[item + 1]; ++i) bump(owners_[i].tensor);
  }
}

}  // namespace pygraph::bindings
