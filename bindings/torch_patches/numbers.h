#pragma once

#include <Python.h>

namespace pygraph::bindings {

// A new reference to the function `as_tensor(number)`: what `torch.as_tensor` makes of a Python or
// NumPy number, on the CPU, in full precision, but several times as fast: for code that turns
// numbers into 0-d tensors before each call. Anything else than a number goes to `torch.as_tensor`,
// and everything does under a mode that might want another result (a default device). Null, with a
// Python error set, if memory ran out.
PyObject* make_as_tensor();

}  // namespace pygraph::bindings
