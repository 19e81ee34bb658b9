#include <ATen/SavedTensorHooks.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include "bind.h"
#include "conversions.h"
#include "torch_patches/compiled_call.h"
#include "torch_patches/numbers.h"
#include "torch_patches/parameter_loader.h"

namespace py = pybind11;

namespace pygraph::bindings {
namespace {

// A guard for Dynamo: true where no default hooks for saved tensors are installed in the thread,
// and else what `otherwise` makes of the argument.
PyObject* has_no_hooks(PyObject* otherwise, PyObject* argument) {
  const bool has_hooks =
      at::SavedTensorDefaultHooks::get_hooks(/*ignore_is_tracing=*/true).has_value();
  return has_hooks ? PyObject_CallOneArg(otherwise, argument) : Py_NewRef(Py_True);
}

PyMethodDef g_has_no_hooks = {"has_no_saved_tensors_hooks", &has_no_hooks, METH_O,
                              "Whether there are no default hooks for saved tensors."};

// Whether one of the tensors belongs to a function transform (torch.func), alive or over. What
// torch.autograd.Function.apply asks of each argument in Python.
bool has_transform_wrapper(const py::tuple& arguments) {
  for (const py::handle argument : arguments) {
    if (!THPVariable_Check(argument.ptr())) continue;
    const c10::DispatchKeySet keys = THPVariable_Unpack(argument.ptr()).key_set();
    if (keys.has(c10::DispatchKey::FuncTorchGradWrapper)) return true;
  }
  return false;
}

}  // namespace

void bind_torch_patches(py::module_& m) {
  m.add_object("as_tensor", steal(make_as_tensor()));
  m.def("has_transform_wrapper", &has_transform_wrapper);
  m.def("compiled_call", [](const py::function& wrapper, const py::object& function,
                            const py::object& module, const py::object& callback,
                            const py::list& enter_hooks, const py::bool_& full_graph,
                            const py::object& raise_to_user) {
    return steal(make_compiled_call({wrapper.ptr(), function.ptr(), module.ptr(), callback.ptr(),
                                     enter_hooks.ptr(), full_graph.ptr(), raise_to_user.ptr()}));
  });
  m.def("saved_hooks_guard", [](const py::function& otherwise) {
    return steal(PyCFunction_New(&g_has_no_hooks, otherwise.ptr()));
  });
  m.def("parameter_loader", [](const std::vector<std::pair<uint32_t, std::string>>& containers,
                               const std::vector<std::pair<uint32_t, std::string>>& items,
                               std::vector<uint32_t> results) {
    ParameterPaths paths;
    for (const auto& [owner, attribute] : containers)
      paths.containers.push_back({owner, attribute});
    for (const auto& [container, key] : items) paths.items.push_back({container, key});
    paths.results = std::move(results);
    return steal(make_parameter_loader(paths));
  });
  m.def("module_call", [](const py::type& type, const py::object& original) {
    return steal(make_module_call(reinterpret_cast<PyTypeObject*>(type.ptr()), original.ptr()));
  });
}

}  // namespace pygraph::bindings
