#pragma once

#include <Python.h>

namespace pygraph::bindings {

// A new reference to a guard for Dynamo: a function of one argument, true where no default hooks
// for saved tensors are installed in the thread, and else what `otherwise` makes of the argument.
// Null, with a Python error set, if memory ran out.
PyObject* make_saved_hooks_guard(PyObject* otherwise);

}  // namespace pygraph::bindings
