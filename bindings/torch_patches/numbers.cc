#include "torch_patches/numbers.h"

#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "conversions.h"

namespace py = pybind11;

namespace pygraph::bindings {
namespace {

// numpy.generic, of which every NumPy number is one and no array; null where there is no NumPy.
PyTypeObject* numpy_generic() {
  static PyTypeObject* const type = [] {
    try {
      py::object generic = py::module_::import("numpy").attr("generic");
      return reinterpret_cast<PyTypeObject*>(generic.release().ptr());
    } catch (py::error_already_set& error) {
      return static_cast<PyTypeObject*>(nullptr);
    }
  }();
  return type;
}

// By the format codes of Python's module `struct`, which NumPy's buffers have.
constexpr std::array<std::pair<char, at::ScalarType>, 10> kDtypes = {
    {{'?', at::kBool},
     {'b', at::kChar},
     {'B', at::kByte},
     {'h', at::kShort},
     {'i', at::kInt},
     {'l', sizeof(long) == 8 ? at::kLong : at::kInt},
     {'q', at::kLong},
     {'e', at::kHalf},
     {'f', at::kFloat},
     {'d', at::kDouble}}};

std::optional<at::ScalarType> dtype_of(const char* format) {
  if (format == nullptr || format[0] == '\0' || format[1] != '\0') return {};
  for (const auto& [code, dtype] : kDtypes) {
    if (code == format[0]) return dtype;
  }
  return {};
}

std::optional<at::Tensor> from_numpy_number(PyObject* number) {
  if (PyFloat_Check(number)) {  // numpy.float64 is a float
    return c10::scalar_to_tensor(PyFloat_AS_DOUBLE(number));
  }
  Py_buffer buffer;
  if (PyObject_GetBuffer(number, &buffer, PyBUF_FORMAT) != 0) {
    PyErr_Clear();
    return {};
  }
  std::optional<at::Tensor> result;
  const auto dtype = buffer.ndim == 0 ? dtype_of(buffer.format) : std::nullopt;
  if (dtype) {
    result = at::detail::empty_cpu({}, at::TensorOptions(*dtype));
    std::memcpy(result->mutable_data_ptr(), buffer.buf, result->itemsize());
  }
  PyBuffer_Release(&buffer);
  return result;
}

std::optional<at::Tensor> from_number(PyObject* number) {
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) return {};
  if (PyFloat_CheckExact(number)) return c10::scalar_to_tensor(PyFloat_AS_DOUBLE(number));
  if (PyLong_CheckExact(number)) {
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow != 0) return {};
    return c10::scalar_to_tensor(value);
  }
  // A default device is such a mode. It is for NumPy's numbers, but not for Python's
  // (torch._as_tensor_fullprec).
  if (at::impl::PythonTorchFunctionTLS::stack_len() != 0) return {};
  PyTypeObject* const generic = numpy_generic();
  if (generic == nullptr || !PyObject_TypeCheck(number, generic)) return {};
  return from_numpy_number(number);
}

PyObject* as_tensor(PyObject* /*module*/, PyObject* number) {
  return returning_errors([&] {
    if (std::optional<at::Tensor> tensor = from_number(number)) {
      return THPVariable_Wrap(*std::move(tensor));
    }
    py::object torch_function = py::module_::import("torch").attr("_as_tensor_fullprec");
    return torch_function(py::handle(number)).release().ptr();
  });
}

PyMethodDef as_tensor_definition = {"as_tensor", &as_tensor, METH_O,
                                    "torch.as_tensor of a number, on the CPU, in full precision."};

}  // namespace

PyObject* make_as_tensor() {
  return PyCFunction_New(&as_tensor_definition, nullptr);
}

}  // namespace pygraph::bindings
