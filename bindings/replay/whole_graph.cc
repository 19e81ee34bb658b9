#include "replay/whole_graph.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <structmember.h>
#include <torch/csrc/autograd/python_variable.h>

#include <tuple>

#include "conversions.h"
#include "replay/graphed_callable.h"
#include "tensors/arguments.h"
#include "tensors/operators.h"
#include "tensors/outputs.h"

namespace py = pybind11;

namespace pygraph::bindings {
namespace {

struct WholeGraph {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* partition;
  PyObject* fallback;
  bool takes_list;
  Route* route;
};

WholeGraph* as_whole_graph(PyObject* object) {
  return reinterpret_cast<WholeGraph*>(object);
}

const at::Tensor& cpu_tensor(PyObject* object) {
  TORCH_CHECK(THPVariable_Check(object));
  const at::Tensor& tensor = unpack_tensor(object);
  TORCH_CHECK(tensor.is_cpu() && !tensor.unsafeGetTensorImpl()->is_python_dispatch());
  return tensor;
}

at::Tensor send(const HostTransfer& sent, PyObject* const* arguments) {
  if (!sent.is_vector) {
    const at::Tensor host = cpu_tensor(arguments[sent.arguments.at(0)]);
    const py::gil_scoped_release unlocked;  // it may be large
    return to_device(host, sent.device);
  }
  std::vector<at::Tensor> numbers;
  numbers.reserve(sent.arguments.size());
  for (const int index : sent.arguments) numbers.push_back(cpu_tensor(arguments[index]));
  return scalars_to_device(numbers, sent.device);
}

// The list of CPU values after they are sent to the GPU. Nothing, without a Python error set, if
// sending them is useless or impossible: PyTorch's way then does it, or raises.
py::object send_first(const WholeGraph& whole, PyObject* const* arguments) {
  const auto* partition = reinterpret_cast<const GraphedCallable*>(whole.partition);
  const bool is_useful =
      !partition->graphs->empty() && !c10::impl::TorchDispatchModeTLS::any_modes_set();
  if (!is_useful && !whole.route->sent.empty()) return {};
  try {
    py::list list;
    for (const HostTransfer& sent : whole.route->sent) {
      list.append(steal(THPVariable_Wrap(send(sent, arguments))));
    }
    return list;
  } catch (const std::exception&) {
    return {};
  }
}

py::object partition_arguments(const Route& route, PyObject* const* arguments,
                               const py::object& sent) {
  py::object list = steal_object(PyList_New(static_cast<Py_ssize_t>(route.inputs.size())));
  if (!list) return list;
  for (size_t i = 0; i < route.inputs.size(); ++i) {
    const int index = route.inputs[i];
    PyObject* argument = index < route.input_count
                             ? arguments[index]
                             : PyList_GET_ITEM(sent.ptr(), index - route.input_count);
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(argument));
  }
  return list;
}

// The caller's frame holds references, too, so no argument is given away.
constexpr Py_ssize_t kUnknownHolders = 0;

PyObject* make_view(PyObject* source, const View& view) {
  if (!THPVariable_Check(source)) return PyErr_Format(PyExc_TypeError, "a view of no tensor");
  const at::Tensor& base = unpack_tensor(source);
  const auto itemsize = static_cast<int64_t>(base.itemsize());
  return THPVariable_Wrap(make_tensor(base.storage(), base.dtype(), view.sizes, view.strides,
                                      (base.storage_offset() + view.offset) * itemsize,
                                      conj_neg_bits_of(base)));
}

PyObject* graph_outputs(const Route& route, const py::object& partition_outputs,
                        PyObject* const* arguments) {
  py::object outputs = steal_object(PyTuple_New(static_cast<Py_ssize_t>(route.outputs.size())));
  if (!outputs) return nullptr;
  for (size_t i = 0; i < route.outputs.size(); ++i) {
    const RouteOutput& output = route.outputs[i];
    PyObject* source = Py_None;
    if (output.source == RouteSource::kOutput) {
      source = PySequence_Fast_GET_ITEM(partition_outputs.ptr(), output.index);
    } else if (output.source == RouteSource::kArgument) {
      source = arguments[output.index];
    }
    PyObject* object = output.view ? make_view(source, *output.view) : Py_NewRef(source);
    if (object == nullptr) return nullptr;
    PyTuple_SET_ITEM(outputs.ptr(), static_cast<Py_ssize_t>(i), object);
  }
  return outputs.release().ptr();
}

// Returns the outputs; or null with a Python error set; or null without one, to take PyTorch's way.
// `holders`: how many lists of the call hold the arguments, including the partition's own.
// `status`: the outcome of the replay.
PyObject* try_shortcut(WholeGraph& whole, PyObject* const* arguments, Py_ssize_t holders,
                       ReplayStatus& status) {
  py::object sent = send_first(whole, arguments);
  if (!sent) return nullptr;
  py::object list = partition_arguments(*whole.route, arguments, sent);
  if (!list) return nullptr;
  auto* partition = reinterpret_cast<GraphedCallable*>(whole.partition);
  PyObject* replayed = nullptr;
  std::tie(replayed, status) = replay_matching(*partition, list.ptr(), holders);
  list = sent = py::object();
  if (status != ReplayStatus::kReplayed) return nullptr;
  return graph_outputs(*whole.route, steal_object(replayed), arguments);
}

const GraphedCallable* decided_by(const WholeGraph& whole, ReplayStatus status) {
  if (status != ReplayStatus::kUncaptured) return nullptr;
  return reinterpret_cast<GraphedCallable*>(whole.partition);
}

PyObject* call_with_list(WholeGraph& whole, PyObject* list) {
  if (!PyList_Check(list) || PyList_GET_SIZE(list) != whole.route->input_count) {
    return PyObject_CallOneArg(whole.fallback, list);
  }
  ReplayStatus status = ReplayStatus::kNoMatch;
  PyObject* outputs = try_shortcut(whole, PySequence_Fast_ITEMS(list), 2, status);
  if (outputs != nullptr) return clear_list(list, outputs);
  if (PyErr_Occurred() != nullptr) return nullptr;
  const ForceUncaptured decided(decided_by(whole, status));
  return PyObject_CallOneArg(whole.fallback, list);
}

PyObject* call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  WholeGraph& whole = *as_whole_graph(self);
  const Py_ssize_t count = PyVectorcall_NARGS(nargsf);
  if (whole.takes_list && count == 1) return call_with_list(whole, args[0]);
  ReplayStatus status = ReplayStatus::kNoMatch;
  if (!whole.takes_list && kwnames == nullptr && count == whole.route->input_count) {
    PyObject* outputs = try_shortcut(whole, args, kUnknownHolders, status);
    if (outputs != nullptr || PyErr_Occurred() != nullptr) return outputs;
  }
  const ForceUncaptured decided(decided_by(whole, status));
  return PyObject_Vectorcall(whole.fallback, args, nargsf, kwnames);
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  Py_CLEAR(as_whole_graph(self)->partition);
  Py_CLEAR(as_whole_graph(self)->fallback);
  delete as_whole_graph(self)->route;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(as_whole_graph(self)->partition);
  Py_VISIT(as_whole_graph(self)->fallback);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(as_whole_graph(self)->partition);
  Py_CLEAR(as_whole_graph(self)->fallback);
  return 0;
}

PyMemberDef g_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(WholeGraph, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot g_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                         {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                         {Py_tp_clear, reinterpret_cast<void*>(clear)},
                         {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                         {Py_tp_members, g_members},
                         {0, nullptr}};

PyType_Spec g_spec = {"pygraph._engine.WholeGraphCallable", sizeof(WholeGraph), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                          Py_TPFLAGS_DISALLOW_INSTANTIATION,
                      g_slots};

}  // namespace

PyTypeObject* whole_graph_type() {
  static auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&g_spec));
  return type;
}

PyObject* make_whole_graph_callable(PyObject* partition, PyObject* fallback, bool takes_list,
                                    Route route) {
  if (!PyObject_TypeCheck(partition, graphed_callable_type())) {
    PyErr_SetString(PyExc_TypeError, "the partition must be a GraphedCallable");
    return nullptr;
  }
  auto* whole = PyObject_GC_New(WholeGraph, whole_graph_type());
  if (whole == nullptr) return nullptr;
  whole->vectorcall = call;
  whole->partition = Py_NewRef(partition);
  whole->fallback = Py_NewRef(fallback);
  whole->takes_list = takes_list;
  whole->route = new Route(std::move(route));
  PyObject_GC_Track(whole);
  return reinterpret_cast<PyObject*>(whole);
}

}  // namespace pygraph::bindings
