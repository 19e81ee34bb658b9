#include "callables/state.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <unordered_set>

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
  memory_ = PointerSet(tensors_.size());
  for (const at::Tensor& tensor : tensors_) memory_.insert(memory_of(tensor));
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

bool State::is_shared_by(PyObject* tensors) const {
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  PointerSet seen(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors, i));
    if (!has_memory(tensor)) continue;
    if (memory_.contains(memory_of(tensor)) || !seen.insert(memory_of(tensor))) return true;
  }
  return false;
}

void State::bump_versions(PyObject* positions) const {
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
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(positions); ++i) {
    const Item& item = items_.at(PyLong_AsSize_t(PyList_GET_ITEM(positions, i)));
    if (!item.is_written) bump(item);
  }
}

}  // namespace pygraph::bindings
