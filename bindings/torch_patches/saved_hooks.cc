#include "torch_patches/saved_hooks.h"

#include <ATen/SavedTensorHooks.h>

namespace pygraph::bindings {
namespace {

PyObject* has_no_hooks(PyObject* otherwise, PyObject* argument) {
  const bool has_hooks =
      at::SavedTensorDefaultHooks::get_hooks(/*ignore_is_tracing=*/true).has_value();
  return has_hooks ? PyObject_CallOneArg(otherwise, argument) : Py_NewRef(Py_True);
}

PyMethodDef g_has_no_hooks = {"has_no_saved_tensors_hooks", &has_no_hooks, METH_O,
                              "Whether there are no default hooks for saved tensors."};

}  // namespace

PyObject* make_saved_hooks_guard(PyObject* otherwise) {
  return PyCFunction_New(&g_has_no_hooks, otherwise);
}

}  // namespace pygraph::bindings
