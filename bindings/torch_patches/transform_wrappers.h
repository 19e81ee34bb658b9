#pragma once

#include <Python.h>

namespace pygraph::bindings {

// Whether one of the tuple's tensors belongs to a function transform (torch.func), alive or over.
// What torch.autograd.Function.apply asks of each argument in Python.
bool has_transform_wrapper(PyObject* tuple);

}  // namespace pygraph::bindings
