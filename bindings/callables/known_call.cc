#include "callables/known_call.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "conversions.h"
#include "replay/graphed_callable.h"
#include "replay/replay_clocks.h"
#include "tensors/gradients.h"

namespace py = pybind11;

namespace pygraph::bindings {
namespace {

Py_ssize_t count_of(PyObject* list) {
  return PyList_GET_SIZE(list);
}

py::object borrow(PyObject* object) {
  return py::reinterpret_borrow<py::object>(object);
}

bool is_graphed_callable(PyObject* object) {
  return PyObject_TypeCheck(object, graphed_callable_type()) != 0;
}

// Whether it is the thread's current device. (The replay itself asks whether a stream of the
// callable's device captures.)
bool is_current(int device) {
  return c10::impl::getDeviceGuardImpl(c10::kCUDA)->getDevice().index() == device;
}

py::list gradients_of(PyObject* tensors) {
  py::list gradients;
  for (Py_ssize_t i = 0; i < count_of(tensors); ++i) {
    const at::Tensor& gradient = THPVariable_Unpack(PyList_GET_ITEM(tensors, i)).grad();
    if (gradient.defined()) gradients.append(steal(THPVariable_Wrap(gradient)));
  }
  return gradients;
}

py::list joined(PyObject* some, const py::list& others) {
  py::list all = py::reinterpret_steal<py::list>(PyList_GetSlice(some, 0, count_of(some)));
  for (const py::handle other : others) all.append(other);
  return all;
}

void bump_versions(PyObject* tensors, PyObject* positions) {
  for (Py_ssize_t i = 0; i < count_of(positions); ++i) {
    const Py_ssize_t position = PyLong_AsSsize_t(PyList_GET_ITEM(positions, i));
    const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors, position));
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace

KnownCall::KnownCall(const py::dict& kind)
    : kind_(kind),
      owner_(part("owner", nullptr)),
      form_(borrow(part("form", nullptr)).cast<const ArgumentForm*>()),
      state_(borrow(part("state", nullptr)).cast<const State*>()),
      watch_(borrow(part("watch", nullptr)).cast<HostWatch*>()),
      probes_hold_(part("probes_hold", nullptr)),
      differentiated_(part("differentiated", &PyList_Type)),
      used_(part("used", &PyList_Type)),
      groups_(part("groups", &PyList_Type)),
      make_rates_(part("make_rates", nullptr)),
      state_tensors_(part("state_tensors", &PyList_Type)),
      written_state_(part("written_state", &PyList_Type)),
      written_arguments_(part("written_arguments", &PyList_Type)),
      beside_(part("beside", &PyList_Type)),
      neighbours_(part("neighbours", &PyList_Type)),
      sharing_(part("sharing", &PyList_Type)),
      shared_with_(part("shared_with", &PyList_Type)),
      counted_(part("counted", &PyList_Type)),
      written_neighbours_(part("written_neighbours", &PyList_Type)),
      made_(part("made", &PyList_Type)),
      cleared_(part("cleared", &PyList_Type)),
      result_of_(part("result_of", nullptr)),
      replay_(part("replay", nullptr)),
      layouts_(borrow(part("layouts", &PyBytes_Type)).cast<std::string>()),
      result_count_(borrow(part("result_count", &PyLong_Type)).cast<Py_ssize_t>()),
      tensors_(*state_, *watch_, differentiated_,
               borrow(part("pattern", &PyBytes_Type)).cast<std::string>()) {
  for (Py_ssize_t i = 0; i < count_of(groups_); ++i) {
    if (!PyDict_Check(PyList_GET_ITEM(groups_, i))) throw std::invalid_argument("groups");
  }
}

PyObject* KnownCall::part(const char* name, PyTypeObject* type) const {
  PyObject* found = PyDict_GetItemString(kind_.ptr(), name);
  if (found == nullptr || (type != nullptr && Py_TYPE(found) != type)) {
    throw std::invalid_argument(name);
  }
  return found;
}

// In Python's order, but for the rates, whose tensors may have to be made: where nothing else
// differs.
bool KnownCall::fits(const py::tuple& args, const py::dict& kwargs, CallInputs& inputs) {
  const py::object found = form_->match(args, kwargs);
  if (found.is_none()) return false;
  inputs.tensors = py::reinterpret_borrow<py::list>(PyTuple_GET_ITEM(found.ptr(), 1));
  ReplayClocks::end(ReplayPart::kArguments);
  if (!tensors_.hold()) return false;
  ReplayClocks::end(ReplayPart::kState);
  if (!watch_->holds_beside_tensors()) return false;
  if (probes_hold_ != Py_None && !steal(PyObject_CallNoArgs(probes_hold_)).cast<bool>()) {
    return false;
  }
  ReplayClocks::end(ReplayPart::kHost);
  inputs.gradients = gradients_of(used_);
  if (count_of(used_) > 0 && gradient_layouts(used_) != layouts_) return false;
  if (!gradients_lie_in(beside_, neighbours_) || !gradients_share_memory(sharing_, shared_with_)) {
    return false;
  }
  const bool uses_gradients = !inputs.gradients.empty();
  for (const py::handle gradient : inputs.gradients) {
    if (THPVariable_Unpack(gradient.ptr()).layout() != c10::kStrided) return false;
  }
  if (state_->is_shared_by(uses_gradients ? joined(inputs.tensors.ptr(), inputs.gradients)
                                          : inputs.tensors)) {
    return false;
  }
  return read_rates(inputs);
}

// Fills `bits`. False where a rate is no plain float.
bool KnownCall::rates_now(std::vector<uint64_t>& bits) const {
  bits.reserve(static_cast<size_t>(count_of(groups_)));
  static PyObject* name = PyUnicode_InternFromString("lr");
  for (Py_ssize_t i = 0; i < count_of(groups_); ++i) {
    PyObject* rate = PyDict_GetItemWithError(PyList_GET_ITEM(groups_, i), name);
    if (rate == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (rate == nullptr || !PyFloat_CheckExact(rate)) return false;
    bits.push_back(std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(rate)));
  }
  return true;
}

// Python makes the tensors, and other threads may run meanwhile.
bool KnownCall::read_rates(CallInputs& inputs) {
  std::vector<uint64_t> now;
  if (!rates_now(now)) return false;
  if (now != rates_ || rate_tensors_.size() != now.size()) {
    const py::object made = steal(PyObject_CallNoArgs(make_rates_));
    std::vector<uint64_t> later;
    if (!rates_now(later) || later != now) return false;
    if (!PyList_CheckExact(made.ptr()) || PyList_GET_SIZE(made.ptr()) != count_of(groups_)) {
      return false;
    }
    rate_tensors_ = py::reinterpret_borrow<py::list>(made);
    rates_ = std::move(now);
  }
  inputs.rates = rate_tensors_;
  return true;
}

py::list KnownCall::arguments(const CallInputs& inputs) {
  const Py_ssize_t passed = count_of(inputs.tensors.ptr());
  const Py_ssize_t state = count_of(state_tensors_);
  const Py_ssize_t gradients = count_of(inputs.gradients.ptr());
  const Py_ssize_t size = passed + state + gradients + count_of(inputs.rates.ptr());
  py::object all = std::exchange(last_, {});
  const bool has_state = all && count_of(all.ptr()) == size;
  if (!has_state) all = steal(PyList_New(size));
  Py_ssize_t next = 0;
  // Steals the reference.
  const auto add = [&](PyObject* object) { PyList_SetItem(all.ptr(), next++, object); };
  for (const py::handle tensor : inputs.tensors) add(Py_NewRef(tensor.ptr()));
  for (Py_ssize_t i = 0; i < state && !has_state; ++i) {
    add(Py_NewRef(PyList_GET_ITEM(state_tensors_, i)));
  }
  next = passed + state;
  for (const py::handle gradient : inputs.gradients) {
    const at::Tensor& tensor = THPVariable_Unpack(gradient.ptr());
    add(steal(THPVariable_Wrap(flat_tensor(tensor.storage(), tensor.scalar_type())))
            .release()
            .ptr());
  }
  for (const py::handle rate : inputs.rates) add(Py_NewRef(rate.ptr()));
  return py::reinterpret_steal<py::list>(all.release());
}

// The tensors of the state are the same ones in the next call.
void KnownCall::keep(const py::list& arguments, Py_ssize_t passed) {
  const Py_ssize_t end = passed + count_of(state_tensors_);
  for (Py_ssize_t i = 0; i < count_of(arguments.ptr()); ++i) {
    if (i < passed || i >= end) PyList_SetItem(arguments.ptr(), i, Py_NewRef(Py_None));
  }
  last_ = arguments;
}

py::object KnownCall::replay(const CallInputs& inputs, const py::list& arguments) {
  if (!is_graphed_callable(replay_)) {
    py::object outputs = steal(PyObject_CallOneArg(replay_, arguments.ptr()));
    if (outputs.is_none()) return {};
    if (!PyList_CheckExact(outputs.ptr()) && !PyTuple_CheckExact(outputs.ptr())) {
      throw py::type_error("a replay returns a list or a tuple");
    }
    return outputs;
  }
  auto* callable = reinterpret_cast<GraphedCallable*>(replay_);
  if (!is_current(callable->device)) return {};
  const auto [outputs, status] = replay_matching(*callable, arguments.ptr(), 1);
  if (status == ReplayStatus::kError) throw py::error_already_set();
  if (status == ReplayStatus::kUncaptured) run_next_call_uncaptured(callable);
  if (status != ReplayStatus::kReplayed) return {};
  py::object held = steal_object(outputs);
  keep(arguments, count_of(inputs.tensors.ptr()));
  ReplayClocks::end(ReplayPart::kRelease);
  return held;
}

void KnownCall::leave_gradients(const py::object& outputs) const {
  if (count_of(made_) > 0 && !set_gradients(made_, outputs.ptr(), result_count_)) {
    throw py::error_already_set();
  }
  if (!clear_gradients(cleared_)) throw py::error_already_set();
}

py::tuple KnownCall::finish(const CallInputs& inputs, const py::object& outputs) const {
  state_->bump_versions(py::reinterpret_borrow<py::list>(written_state_));
  bump_versions(inputs.tensors.ptr(), written_arguments_);
  bump_gradient_versions(counted_);
  bump_versions(neighbours_, written_neighbours_);
  ReplayClocks::end(ReplayPart::kVersions);
  try {
    leave_gradients(outputs);
  } catch (const py::error_already_set&) {  // of an interrupt in a setter, say
    leave_gradients(outputs);
    throw;
  }
  ReplayClocks::end(ReplayPart::kGradients);
  py::object result;
  if (result_of_ == Py_None) {
    result = borrow(PySequence_Fast_GET_ITEM(outputs.ptr(), 0));
  } else {
    const py::object leaves = steal(PySequence_GetSlice(outputs.ptr(), 0, result_count_));
    PyObject* given[] = {leaves.ptr(), inputs.tensors.ptr()};
    const bool is_type = PyType_Check(result_of_) != 0;  // a tuple or a list
    result = steal(PyObject_Vectorcall(result_of_, given, is_type ? 1 : 2, nullptr));
  }
  return py::make_tuple(std::move(result));
}

}  // namespace pygraph::bindings
