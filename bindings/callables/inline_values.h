// Attributes that lie in an object itself, compared as memory.
//
// Python 3.13 keeps the values of most objects' attributes in the object, and the dictionary behind
// its `__dict__` refers to them. Python does not tell when such an attribute is set
// (dict_changes.h), so each call compares them: a module of PyTorch has some 25. As memory, that
// takes a few nanoseconds.
#pragma once

#include <Python.h>

#include <cstddef>
#include <vector>

namespace pygraph::bindings {

// To be used with Python's lock, while the dictionary and its present values are held.
class InlineValues {
 public:
  // Of no dictionary: nothing is known.
  InlineValues() = default;
  // Nothing is known of a dictionary that has its values in a table of its own.
  explicit InlineValues(PyObject* dict);

  // Whether they surely are the same objects, of the same names and in the same order.
  bool are_same() const;

 private:
  PyObject* dict_ = nullptr;
  const void* keys_ = nullptr;
  const void* values_ = nullptr;
  std::vector<std::byte> memory_;  // what was there; empty if nothing is known
};

}  // namespace pygraph::bindings
