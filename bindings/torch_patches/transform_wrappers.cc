#include "torch_patches/transform_wrappers.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

namespace pygraph::bindings {

bool has_transform_wrapper(PyObject* tuple) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    PyObject* argument = PyTuple_GET_ITEM(tuple, i);
    if (!THPVariable_Check(argument)) continue;
    const c10::DispatchKeySet keys = THPVariable_Unpack(argument).key_set();
    if (keys.has(c10::DispatchKey::FuncTorchGradWrapper)) return true;
  }
  return false;
}

}  // namespace pygraph::bindings
