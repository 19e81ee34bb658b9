#include "saved_hooks.h"

#include <ATen/SavedTensorHooks.h>

namespace pygraph {
namespace {

// `state` is a tuple: the list, and `otherwise`.
PyObject* has_no_hooks(PyObject* state, PyObject* argument) {
  const bool has_hooks =
      at::SavedTensorDefaultHooks::get_hooks(/*ignore_is_tracing=*/true).has_value();
  const bool is_usual = !has_hooks && PyList_GET_SIZE(PyTuple_GET_ITEM(state, 0)) == 0;
  return is_usual ? Py_NewRef(Py_True) : PyObject_CallOneArg(PyTuple_GET_ITEM(state, 1), argument);
}

PyMethodDef g_has_no_hooks = {"has_no_saved_tensors_hooks", &has_no_hooks, METH_O,
                              "Whether there are no default hooks for saved tensors, and the "
                              "program need not be compiled anew."};

}  // namespace

PyObject* make_saved_hooks_guard(PyObject* expired, PyObject* otherwise) {
  PyObject* state = PyTuple_Pack(2, expired, otherwise);
  if (state == nullptr) return nullptr;
  PyObject* guard = PyCFunction_New(&g_has_no_hooks, state);
  Py_DECREF(state);
  return guard;
}

}  // namespace pygraph
