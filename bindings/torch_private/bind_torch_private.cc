#include <pybind11/pybind11.h>

#include "bind.h"
#include "torch_private/blas_workspaces.h"

namespace py = pybind11;

namespace pygraph::bindings {

void bind_torch_private(py::module_& m) {
  m.def("free_blas_workspaces", &free_blas_workspaces, py::call_guard<py::gil_scoped_release>());
}

}  // namespace pygraph::bindings
