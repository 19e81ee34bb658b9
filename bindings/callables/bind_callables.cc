#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "bind.h"
#include "callables/argument_form.h"
#include "callables/autograd_graph.h"
#include "callables/call_observer.h"
#include "callables/host_watch.h"
#include "callables/modes.h"
#include "callables/served_calls.h"
#include "callables/state.h"
#include "callables/storage_exchange.h"
#include "tensors/gradients.h"

namespace py = pybind11;

namespace pygraph::bindings {
namespace {

using Tensors = std::vector<at::Tensor>;

// What a weak reference or proxy stands for; None if it is gone. Throws TypeError for another
// object.
py::object referent_of(py::handle reference) {
  if (!PyWeakref_Check(reference.ptr())) throw py::type_error("not a weak reference");
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* referent = nullptr;
  if (PyWeakref_GetRef(reference.ptr(), &referent) < 0) throw py::error_already_set();
  if (referent == nullptr) return py::none();
  return py::reinterpret_steal<py::object>(referent);
#else
  return py::reinterpret_borrow<py::object>(PyWeakref_GetObject(reference.ptr()));
#endif
}

// On the CPU: what the call has read or written, and that was not born in it, with the operator
// that was first given it, whether it was written, and its bytes. None for a tensor that is gone.
py::list host_tensors(const CallObserver& observer) {
  py::list found;
  for (const SeenStorage& seen : observer.storages()) {
    if (seen.is_born || !seen.device.is_cpu()) continue;
    at::Tensor tensor;
    for (const SeenTensor& through : seen.tensors) {
      const at::Tensor owner(through.tensor.lock());
      if (owner.defined()) tensor = owner;
    }
    found.append(py::make_tuple(tensor, seen.user, seen.is_written, seen.bytes));
  }
  return found;
}

// The operators that made memory on `device` in the call which is still alive, but for that of the
// `known` tensors.
std::vector<std::string> makers_of_survivors(const CallObserver& observer, const Tensors& known,
                                             c10::Device device) {
  std::vector<const c10::StorageImpl*> expected;
  for (const at::Tensor& tensor : known) {
    if (tensor.has_storage()) expected.push_back(tensor.storage().unsafeGetStorageImpl());
  }
  std::vector<std::string> makers;
  for (const SeenStorage& seen : observer.storages()) {
    if (!seen.is_born || seen.device != device) continue;
    const c10::Storage storage(seen.storage.lock());
    if (!storage || storage.nbytes() == 0) continue;
    if (std::ranges::find(expected, storage.unsafeGetStorageImpl()) == expected.end()) {
      makers.push_back(seen.user);
    }
  }
  return makers;
}

// Whether anything but `device` and the CPU was used.
bool used_other_devices(const CallObserver& observer, c10::Device device) {
  return std::ranges::any_of(observer.storages(), [&](const SeenStorage& seen) {
    return !seen.device.is_cpu() && seen.device != device;
  });
}

void bind_observer(py::module_& m) {
  py::class_<CallObserver>(m, "CallObserver")
      .def(py::init<py::function>())
      .def("end", &CallObserver::end)
      .def_property_readonly("backward_nodes", &CallObserver::backward_nodes)
      .def_property_readonly("unknown", &CallObserver::unknown)
      .def("has_used", [](const CallObserver& observer,
                          const at::Tensor& tensor) { return observer.find(tensor) != nullptr; })
      .def("used_other_devices", &used_other_devices)
      .def("host_tensors", &host_tensors)
      .def("makers_of_survivors", &makers_of_survivors);
}

void bind_state(py::module_& m) {
  py::class_<State>(m, "State")
      .def(py::init<const CallObserver&, const Tensors&, const Tensors&, c10::Device>())
      .def("tensors", &State::tensors)
      .def_property_readonly("unowned", &State::unowned)
      .def_property_readonly("written", &State::written)
      .def_property_readonly("is_valid", &State::is_valid)
      .def("is_shared_by", &State::is_shared_by)
      .def("count", &State::count)
      .def("bump_versions", &State::bump_versions);
  const auto flat = [](const at::Tensor& tensor) {
    return flat_tensor(tensor.storage(), tensor.scalar_type());
  };
  m.def("flat_tensor", flat);
  m.def("flat_tensors", [flat](Tensors tensors) {
    std::ranges::transform(tensors, tensors.begin(), flat);
    return tensors;
  });
  py::class_<StorageExchange>(m, "StorageExchange")
      .def(py::init<const Tensors&, Tensors>())
      .def("undo", &StorageExchange::undo);
}

void bind_autograd_graph(py::module_& m) {
  // What is reached, whether anything else is, and a node with a hook.
  m.def("survey_graph", [](const Tensors& results, const Tensors& ends) {
    const GraphSurvey survey = survey_graph(results, ends);
    return py::make_tuple(survey.reached, survey.reaches_others, survey.hooked);
  });
  m.def("reroute_graph", &reroute_graph);
  m.def("lead_gradients", &lead_gradients);
  m.def("has_accumulator_hooks", &has_accumulator_hooks);
  m.def("referent_of", &referent_of);
  py::class_<FreshAccumulators>(m, "FreshAccumulators")
      .def(py::init<Tensors>())
      .def("undo", &FreshAccumulators::undo);
}

void bind_gradients(py::module_& m) {
  m.def("gradient_pattern",
        [](const py::list& tensors) { return py::bytes(gradient_pattern(tensors.ptr())); });
  m.def("has_gradient_pattern", [](const py::list& tensors, const py::bytes& pattern) {
    return has_gradient_pattern(tensors.ptr(), std::string_view(pattern));
  });
  m.def("gradient_layouts",
        [](const py::list& tensors) { return py::bytes(gradient_layouts(tensors.ptr())); });
  m.def("gradients_lie_in", [](const py::list& tensors, const py::list& others) {
    return gradients_lie_in(tensors.ptr(), others.ptr());
  });
  m.def("gradients_share_memory", [](const py::list& tensors, const py::list& others) {
    return gradients_share_memory(tensors.ptr(), others.ptr());
  });
  m.def("bump_gradient_versions",
        [](const py::list& tensors) { bump_gradient_versions(tensors.ptr()); });
  m.def("gradients_of", [](const py::list& tensors) {
    py::list gradients;
    for (const py::handle& tensor : tensors) {
      const at::Tensor& gradient = THPVariable_Unpack(tensor.ptr()).grad();
      if (gradient.defined()) gradients.append(gradient);
    }
    return gradients;
  });
  m.def("set_gradients", [](const py::list& tensors, const py::object& values, Py_ssize_t first) {
    if (!PyList_Check(values.ptr()) && !PyTuple_Check(values.ptr())) {
      throw py::type_error("not a list or a tuple");
    }
    if (!set_gradients(tensors.ptr(), values.ptr(), first)) throw py::error_already_set();
  });
  m.def("remove_saved_tensors_hooks", &remove_saved_tensors_hooks);
  m.def("bump_versions", [](const py::list& tensors, const py::list& positions) {
    for (const py::handle& position : positions) {
      const size_t i = PyLong_AsSize_t(position.ptr());
      if (i >= tensors.size()) throw py::index_error();
      const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors.ptr(), i));
      if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    }
  });
  m.def("clear_gradients", [](const py::list& tensors) {
    if (!clear_gradients(tensors.ptr())) throw py::error_already_set();
  });
}

void bind_arguments(py::module_& m) {
  m.def("modes", [] { return current_modes().text(); });
  m.def("are_operators_watched", &are_operators_watched);
  py::class_<ArgumentForm>(m, "ArgumentForm")
      .def("match", &ArgumentForm::match)
      .def_property_readonly("leaf_types", &ArgumentForm::leaf_types);
  m.def("argument_form", &ArgumentForm::of);
}

void bind_host_watch(py::module_& m) {
  py::class_<HostWatch>(m, "HostWatch")
      .def(py::init<>())
      .def("add_dict_items", &HostWatch::add_dict_items)
      .def("add_whole_dict", &HostWatch::add_whole_dict)
      .def("add_list", &HostWatch::add_list)
      .def("add_set", &HostWatch::add_set)
      .def("add_cell", &HostWatch::add_cell)
      .def("add_member", &HostWatch::add_member)
      .def("add_tensor", &HostWatch::add_tensor)
      .def("add_function", &HostWatch::add_function)
      .def("add_instance", &HostWatch::add_instance)
      .def("add_class", &HostWatch::add_class)
      .def("add_class_contents", &HostWatch::add_class_contents)
      .def("holds", py::overload_cast<>(&HostWatch::holds))
      .def("restore", py::overload_cast<>(&HostWatch::restore));
}

void bind_served_calls(py::module_& m) {
  m.def("served_calls", &make_served_calls);
  m.def("add_known_call", &add_known_call);
  m.def("forget_known_calls", &forget_known_calls);
  m.def("take_served_count", &take_served_count);
}

}  // namespace

void bind_callables(py::module_& m) {
  bind_observer(m);
  bind_state(m);
  bind_autograd_graph(m);
  bind_gradients(m);
  bind_arguments(m);
  bind_host_watch(m);
  bind_served_calls(m);
}

}  // namespace pygraph::bindings
