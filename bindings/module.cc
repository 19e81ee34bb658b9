// pygraph._engine_2_15, or as PYGRAPH_ENGINE says: the engine for Python and one release of
// PyTorch. No logic here, only names.
#include <pybind11/pybind11.h>
#include <torch/headeronly/version.h>

#include <string>

#include "bind.h"
#include "pygraph/recording.h"

namespace py = pybind11;

PYBIND11_MODULE(PYGRAPH_ENGINE, m) {
  using namespace pygraph::bindings;  // NOLINT(google-build-using-namespace)
  m.doc() = "PyGraph's engine: record, link and replay CUDA graphs.";
  m.attr("built_for") =
      std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR);
  py::register_exception<pygraph::NotRelocatable>(m, "NotRelocatable", PyExc_RuntimeError);
  py::register_exception<pygraph::DriverError>(m, "DriverError", PyExc_RuntimeError);
  bind_torch_patches(m);
  bind_tensors(m);
  bind_replay(m);
  bind_record(m);  // its results are what bind_replay() has bound
  bind_callables(m);
}
