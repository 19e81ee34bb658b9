// Conversions between Python objects and errors and those of C++, for the bindings.
#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <exception>

namespace pygraph::bindings {

// Takes over a new reference, or null.
inline pybind11::object steal_object(PyObject* object) {
  return pybind11::reinterpret_steal<pybind11::object>(object);
}

// Takes over a new reference. Throws the Python error that is set if it is null.
inline pybind11::object steal(PyObject* object) {
  if (object == nullptr) throw pybind11::error_already_set();
  return steal_object(object);
}

// Of a list or tuple; a borrowed reference.
inline PyObject* item(PyObject* sequence, Py_ssize_t i) {
  return PyTuple_Check(sequence) ? PyTuple_GET_ITEM(sequence, i) : PyList_GET_ITEM(sequence, i);
}

inline c10::Device cuda_device(int index) {
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

// The result of `call`, a function that returns a new reference. Null, with a Python error set, if
// it throws.
template <typename Call>
PyObject* returning_errors(const Call& call) {
  try {
    return call();
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

}  // namespace pygraph::bindings
