#include "tensors/donation.h"

#include <c10/core/Allocator.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <map>

#include "tensors/arguments.h"
#include "tensors/recorded_streams.h"

namespace pygraph::bindings {

bool is_given_away(PyObject* arguments, const GivenAway& tensors, Py_ssize_t holders) {
  const auto is_held_by_nobody_else = [&](uint32_t position) {
    PyObject* object = PyList_GET_ITEM(arguments, position);
    if (!THPVariable_Check(object) || Py_REFCNT(object) != holders) return false;
    const at::Tensor& tensor = unpack_tensor(object);
    return tensor.is_cuda() && tensor.has_storage() && tensor.use_count() == 1;
  };
  if (!std::ranges::all_of(tensors.positions, is_held_by_nobody_else)) return false;
  const auto tensor_at = [&](uint32_t position) -> const at::Tensor& {
    return unpack_tensor(PyList_GET_ITEM(arguments, position));
  };
  const at::Tensor& first = tensor_at(tensors.positions.front());
  const c10::Storage& storage = first.storage();
  const auto lies_in_storage = [&](uint32_t position) {
    return tensor_at(position).storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
  };
  // Tensor.record_stream works on blocks that come from PyTorch's allocator, and only those.
  static const c10::DeleterFnPtr deleter = c10::GetAllocator(c10::kCUDA)->raw_deleter();
  return !is_used_by_other_streams(storage.unsafeGetStorageImpl()) && first.storage_offset() == 0 &&
         storage.nbytes() >= tensors.bytes && storage.use_count() == tensors.positions.size() &&
         std::ranges::all_of(tensors.positions, lies_in_storage) && deleter != nullptr &&
         storage.data_ptr().get_deleter() == deleter;
}

std::vector<GivenAway> given_away(PyObject* arguments) {
  std::vector<GivenAway> groups;
  std::map<const c10::StorageImpl*, size_t> group_of;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(arguments); ++i) {
    PyObject* object = PyList_GET_ITEM(arguments, i);
    if (!THPVariable_Check(object) || !unpack_tensor(object).has_storage()) continue;
    const at::Tensor& tensor = unpack_tensor(object);
    const auto [entry, is_new] =
        group_of.emplace(tensor.storage().unsafeGetStorageImpl(), groups.size());
    if (is_new) groups.emplace_back();
    GivenAway& group = groups[entry->second];
    const uint64_t offset = tensor.storage_offset() * tensor.itemsize();
    group.bytes = std::max(group.bytes, offset + extent_of(tensor));
    group.positions.insert(offset == 0 ? group.positions.begin() : group.positions.end(),
                           static_cast<uint32_t>(i));
  }
  std::erase_if(groups,
                [&](const GivenAway& group) { return !is_given_away(arguments, group, 1); });
  return groups;
}

c10::DataPtr Donations::take(PyObject* argument) {
  const c10::Storage& storage = unpack_tensor(argument).storage();
  moves_.push_back({storage, {}});
  return storage.unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, storage.device()));
}

void Donations::given_to(const c10::Storage& output) {
  moves_.back().to = output;
}

Donations::~Donations() {
  for (Move& move : moves_) {
    if (!move.to) continue;
    c10::StorageImpl* output = move.to.unsafeGetStorageImpl();
    move.from.unsafeGetStorageImpl()->set_data_ptr_noswap(
        output->set_data_ptr(c10::DataPtr(nullptr, move.to.device())));
  }
}

}  // namespace pygraph::bindings
