#include "replay/own_inputs.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <new>

#include "tensors/prefetch.h"

namespace pygraph::bindings {

OwnInputs::OwnInputs(PyObject* tensors, Py_ssize_t first)
    : tensors_(PyList_AsTuple(tensors)), first_(static_cast<size_t>(first)) {
  if (tensors_ == nullptr) throw std::bad_alloc();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors_); ++i) {
    const at::Tensor& tensor = THPVariable_Unpack(PyTuple_GET_ITEM(tensors_, i));
    storages_.push_back(tensor.storage());
  }
  addresses_.resize(storages_.size());
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
