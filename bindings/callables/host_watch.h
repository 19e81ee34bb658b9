// Watches values on the host that a callable reads: whether any has changed, and how to undo it.
//
// A replay does not run the callable's Python, so each value that Python would have read must be
// what it was when the graph was recorded. Python finds the places (python/pygraph/callables/
// reachable.py); there may be thousands, which are compared at each call, so they are compared
// here: by identity, and numbers and strings by value where they are other objects.
#pragma once

#include <Python.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace pygraph::bindings {

// Holds references to all containers and values. To be used with Python's lock.
class HostWatch {
 public:
  HostWatch() = default;
  ~HostWatch();
  HostWatch(const HostWatch&) = delete;
  HostWatch& operator=(const HostWatch&) = delete;

  // The values as they are now. Of a dictionary all entries, or those of `keys` (a tuple), or where
  // it is null all.
  void add_dict(PyObject* dict, PyObject* keys);
  void add_list(PyObject* list);
  void add_cell(PyObject* cell);
  // Whether it requires a gradient.
  void add_tensor(PyObject* tensor);

  // Whether everything is as it was when it was added.
  bool holds() const;
  // Puts back what dictionaries, lists and cells had. False with a Python error set on failure.
  bool restore();

 private:
  struct Dict {
    PyObject* dict;
    bool is_whole;
    std::vector<std::pair<PyObject*, PyObject*>> items;  // a null value: the key is not there
  };
  struct List {
    PyObject* list;
    std::vector<PyObject*> items;
  };
  struct Cell {
    PyObject* cell;
    PyObject* value;  // or null
  };
  struct Tensor {
    PyObject* tensor;
    bool requires_grad;
  };
  static bool holds(const Dict& watched);
  static bool holds(const List& watched);
  static bool holds(const Tensor& watched);
  static bool restore(const Dict& watched);
  static bool restore(const List& watched);

  std::vector<Dict> dicts_;
  std::vector<List> lists_;
  std::vector<Cell> cells_;
  std::vector<Tensor> tensors_;
};

}  // namespace pygraph::bindings
