// Inputs that nobody but PyGraph has: the flat tensors that cover the state of a graphed callable.
//
// Each call passes the same tensors, some 800 for ResNet-50, and nobody gives them another layout.
// What can change is where the memory of their storages lies. So if they have matched a graph once,
// and all their addresses are the same, they still match it. An address is read from the storage,
// which is one line of the CPU's caches in place of the nine that a comparison reads.
#pragma once

#include <c10/core/Storage.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "tensors/arguments.h"

namespace pygraph::bindings {

// Needs Python's lock.
class OwnInputs {
 public:
  // `tensors`: the arguments from `first` on. Throws std::invalid_argument.
  OwnInputs(const pybind11::list& tensors, Py_ssize_t first);

  // Whether they are among the arguments, at their positions. Then their addresses are read.
  bool read(PyObject* arguments);
  // Those that were read last.
  const std::vector<uint64_t>& addresses() const { return addresses_; }
  Positions positions() const { return {first_, first_ + storages_.size()}; }
  bool has(size_t position) const { return position - first_ < storages_.size(); }
  uint64_t address(size_t position) const { return addresses_[position - first_]; }

  PyObject* tensors() const { return tensors_.ptr(); }

 private:
  pybind11::tuple tensors_;
  size_t first_;
  std::vector<c10::Storage> storages_;
  std::vector<uint64_t> addresses_;
};

}  // namespace pygraph::bindings
