// Conversions between Python objects and errors and those of C++, for the bindings.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>

#include <exception>
#include <vector>

namespace pygraph::bindings {

// Takes over a new reference. Throws the Python error that is set if it is null.
inline pybind11::object steal(PyObject* object) {
  if (object == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(object);
}

inline c10::Device cuda_device(int index) {
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

// Throws TypeError for what is not a torch.device.
inline c10::Device device_of(const pybind11::object& device) {
  if (!THPDevice_Check(device.ptr())) throw pybind11::type_error("not a torch.device");
  return reinterpret_cast<THPDevice*>(device.ptr())->device;
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

// The tensors of a list that holds nothing else.
inline std::vector<at::Tensor> tensors_of(const pybind11::list& list) {
  std::vector<at::Tensor> tensors;
  for (const pybind11::handle& object : list) tensors.push_back(THPVariable_Unpack(object.ptr()));
  return tensors;
}

}  // namespace pygraph::bindings
