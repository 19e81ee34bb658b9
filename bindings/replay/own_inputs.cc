#include "replay/own_inputs.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <stdexcept>

#include "tensors/prefetch.h"

namespace pygraph::bindings {

OwnInputs::OwnInputs(const pybind11::list& tensors, Py_ssize_t first)
    : tensors_(tensors), first_(static_cast<size_t>(first)) {
  for (const pybind11::handle tensor : tensors_) {
    PyObject* object = tensor.ptr();
    if (!THPVariable_Check(object) || !THPVariable_Unpack(object).has_storage() ||
        THPVariable_Unpack(object).storage_offset() != 0) {
      throw std::invalid_argument("own inputs are tensors that cover their storages");
    }
    storages_.push_back(THPVariable_Unpack(object).storage());
  }
  addresses_.resize(storages_.size());
}

bool OwnInputs::read(PyObject* arguments) {
  const size_t count = storages_.size();
  if (static_cast<size_t>(PyList_GET_SIZE(arguments)) < first_ + count) return false;
  PyObject* const* given = reinterpret_cast<PyListObject*>(arguments)->ob_item + first_;
  if (!std::equal(given, given + count,
                  reinterpret_cast<PyTupleObject*>(tensors_.ptr())->ob_item)) {
    return false;
  }
  constexpr size_t kAhead = 16;
  constexpr size_t kRead = 64;  // bytes of a storage, from its first: its address and its flags
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      prefetch(storages_[i + kAhead].unsafeGetStorageImpl(), kRead);
    }
    addresses_[i] = reinterpret_cast<uint64_t>(storages_[i].mutable_data());
  }
  return true;
}

}  // namespace pygraph::bindings
