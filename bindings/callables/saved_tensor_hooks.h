// PyGraph's hooks for saved tensors are taken off the thread's stack wherever they are.
#pragma once

#include <Python.h>

namespace pygraph::bindings {

// Removes the hooks that were pushed with `pack`, if they are there, in one step: an interrupt
// finds them on the stack or gone. `with_others`: and those that were pushed after them. Returns
// whether there were any of these. Needs Python's lock.
bool remove_saved_tensors_hooks(PyObject* pack, bool with_others);

}  // namespace pygraph::bindings
