#include "replay/own_inputs.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <new>
#include <stdexcept>

#include "tensors/prefetch.h"

namespace pygraph::bindings {

OwnInputs::OwnInputs(PyObject* tensors, Py_ssize_t first)
    : tensors_(nullptr), first_(static_cast<size_t>(first)) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    PyObject* object = PyList_GET_ITEM(tensors, i);
    if (!THPVariable_Check(object) || !THPVariable_Unpack(object).has_storage() ||
        THPVariable_Unpack(object).storage_offset() != 0) {
      throw std::invalid_argument("own inputs are tensors that cover their storages");
    }
    storages_.push_back(THPVariable_Unpack(object).storage());
  }
  addresses_.resize(storages_.size());
  tensors_ = PyList_AsTuple(tensors);
  if (tensors_ == nullptr) throw std::bad_alloc();
}

OwnInputs::~OwnInputs() {
  Py_DECREF(tensors_);
}

bool OwnInputs::read(PyObject* arguments) {
  const size_t count = storages_.size();
  if (static_cast<size_t>(PyList_GET_SIZE(arguments)) < first_ + count) return false;
  PyObject* const* given = reinterpret_cast<PyListObject*>(arguments)->ob_item + first_;
  if (!std::equal(given, given + count, reinterpret_cast<PyTupleObject*>(tensors_)->ob_item)) {
    return false;
  }
  constexpr size_t kAhead = 16;
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      prefetch(storages_[i + kAhead].unsafeGetStorageImpl(), sizeof(c10::StorageImpl));
    }
    addresses_[i] = reinterpret_cast<uint64_t>(storages_[i].mutable_data());
  }
  return true;
}

}  // namespace pygraph::bindings
