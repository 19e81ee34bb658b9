// The form of the arguments of a call, which tells whether those of another call are alike.
//
// Taking arguments apart in Python (python/pygraph/callables/signature.py) takes about 10 us. Most
// calls have arguments of the same form as earlier ones: the same containers with the same keys,
// equal values, tensors in the same places. So each form is stored as a list of nodes, in the order
// of PyTorch's pytree, and the next arguments are compared with it.
//
// Only common arguments have a form: tuples, lists and dictionaries with strings or integers as
// keys; plain tensors; values; and other objects, which are compared by identity. A form matches
// only if Python would compute an equal key; if it does not match, Python takes the arguments
// apart.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "callables/modes.h"
#include "callables/pointer_set.h"

namespace pygraph::bindings {

// To be used with Python's lock. Of objects that are no values it keeps addresses alone.
class ArgumentForm {
 public:
  // With the modes of the thread. Null where such arguments have no form. `node_types`: pytree's
  // dictionary of what is a container; the types of leaves are not to be in it.
  static std::unique_ptr<ArgumentForm> of(const pybind11::tuple& args, const pybind11::dict& kwargs,
                                          const pybind11::dict& node_types);

  // If the arguments and the modes of the thread are alike: the leaves, and the tensors among them,
  // each once. Otherwise None.
  pybind11::object match(const pybind11::tuple& args, const pybind11::dict& kwargs) const;

  // The types of the leaves. Who keeps the form must keep them.
  pybind11::list leaf_types() const;

 private:
  enum class Kind : uint8_t { kTuple, kList, kDict, kTensor, kValue, kObject };
  struct Node {
    Kind kind;
    PyTypeObject* type;                // of the object
    Py_ssize_t number = 0;             // elements of a container; which of the tensors
    bool requires_grad = false;        // of a tensor
    bool has_gradient = false;         // of a tensor
    bool is_inference = false;         // of a tensor
    bool has_history = false;          // of a tensor
    pybind11::object value{};          // of a value; a tuple of a dictionary's keys
    const PyObject* object = nullptr;  // which object; not to be followed
  };
  struct Found {
    const Node* next;
    pybind11::list leaves;
    pybind11::list tensors;  // each once
    PointerSet seen;         // the same
  };

  explicit ArgumentForm(pybind11::dict node_types);
  bool add(PyObject* object, std::vector<PyObject*>& tensors, int depth);
  bool add_dict(PyObject* dict, std::vector<PyObject*>& tensors, int depth);
  bool add_leaf(PyObject* leaf, std::vector<PyObject*>& tensors);
  static bool visit(PyObject* object, Found& found);
  static bool visit_dict(PyObject* dict, Found& found);
  static bool visit_tensor(const Node& node, PyObject* tensor, Found& found);
  bool are_leaves() const;

  Modes modes_;
  pybind11::dict node_types_;
  std::vector<Node> nodes_;
  std::vector<PyTypeObject*> leaf_types_;  // each once
  size_t tensor_count_ = 0;                // each once
};

}  // namespace pygraph::bindings
