#include <torch/csrc/utils/pybind.h>

#include "bind.h"
#include "conversions.h"
#include "tensors/arguments.h"
#include "tensors/donation.h"
#include "tensors/followed_number.h"
#include "tensors/free_observer.h"

namespace py = pybind11;

namespace pygraph::bindings {

void bind_tensors(py::module_& m) {
  m.def("signature", [](const py::list& arguments, int device) {
    return py::bytes(signature_of(arguments.ptr(), cuda_device(device)));
  });
  m.attr("FollowedNumber") =
      py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(followed_number_type()));
  py::class_<GivenAway>(m, "GivenAway").def_readonly("positions", &GivenAway::positions);
  m.def("given_away", [](const py::list& arguments) { return given_away(arguments.ptr()); });
  m.def("memory_of", &memory_of);
  py::class_<FreeObserver>(m, "FreeObserver")
      .def(py::init<const std::vector<at::Tensor>&, py::function>())
      .def("end", &FreeObserver::end);
}

}  // namespace pygraph::bindings
