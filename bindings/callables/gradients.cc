#include "callables/gradients.h"

#include <torch/csrc/autograd/python_variable.h>

#include <stdexcept>

namespace pygraph::bindings {
namespace {

char has_gradient(PyObject* tensors, Py_ssize_t i) {
  return THPVariable_Unpack(PyList_GET_ITEM(tensors, i)).grad().defined() ? 1 : 0;
}

// Kept for good, so that it needs not be looked up.
PyObject* name_of_gradient() {
  static PyObject* name = PyUnicode_InternFromString("grad");
  return name;
}

// A setter may run Python, which may change the list.
bool set_gradient(PyObject* tensors, Py_ssize_t i, PyObject* value) {
  PyObject* tensor = Py_NewRef(PyList_GET_ITEM(tensors, i));
  const int failed = PyObject_SetAttr(tensor, name_of_gradient(), value);
  Py_DECREF(tensor);
  return failed == 0;
}

}  // namespace

std::string gradient_pattern(PyObject* tensors) {
  std::string pattern(PyList_GET_SIZE(tensors), 0);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) pattern[i] = has_gradient(tensors, i);
  return pattern;
}

bool has_gradient_pattern(PyObject* tensors, std::string_view pattern) {
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  if (static_cast<size_t>(count) != pattern.size()) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (has_gradient(tensors, i) != pattern[i]) return false;
  }
  return true;
}

bool set_gradients(PyObject* tensors, PyObject* values, Py_ssize_t first) {
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  if (PySequence_Fast_GET_SIZE(values) - first != count) {
    throw std::invalid_argument("not as many gradients as tensors");
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    if (!set_gradient(tensors, i, PySequence_Fast_GET_ITEM(values, first + i))) return false;
  }
  return true;
}

bool clear_gradients(PyObject* tensors) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    if (!set_gradient(tensors, i, Py_None)) return false;
  }
  return true;
}

}  // namespace pygraph::bindings
