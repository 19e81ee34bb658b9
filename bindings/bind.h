// One function per folder, which binds the folder's functions and types (replay's also those of
// torch_private); module.cc calls them in order.
#pragma once

#include <pybind11/pybind11.h>

namespace pygraph::bindings {

void bind_torch_patches(pybind11::module_& m);
void bind_tensors(pybind11::module_& m);
void bind_replay(pybind11::module_& m);
void bind_record(pybind11::module_& m);
void bind_callables(pybind11::module_& m);

}  // namespace pygraph::bindings
