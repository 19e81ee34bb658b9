#include "whole_graph.h"

#include <structmember.h>

#include "graphed_callable.h"

namespace pygraph {
namespace {

struct Route {
  std::vector<int> inputs;
  std::vector<std::pair<bool, int>> outputs;
};

struct WholeGraph {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* partition;
  PyObject* fallback;
  Route* route;
};

WholeGraph* as_whole_graph(PyObject* object) { return reinterpret_cast<WholeGraph*>(object); }

PyObject* partition_arguments(const Route& route, PyObject* arguments) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(route.inputs.size()));
  if (list == nullptr) return nullptr;
  for (size_t i = 0; i < route.inputs.size(); ++i) {
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i),
                    Py_NewRef(PyList_GET_ITEM(arguments, route.inputs[i])));
  }
  return list;
}

PyObject* graph_outputs(const Route& route, PyObject* partition_outputs, PyObject* arguments) {
  PyObject* outputs = PyTuple_New(static_cast<Py_ssize_t>(route.outputs.size()));
  if (outputs == nullptr) return nullptr;
  for (size_t i = 0; i < route.outputs.size(); ++i) {
    const auto [is_output, index] = route.outputs[i];
    PyObject* source = is_output ? PySequence_Fast_GET_ITEM(partition_outputs, index)
                                 : PyList_GET_ITEM(arguments, index);
    PyTuple_SET_ITEM(outputs, static_cast<Py_ssize_t>(i), Py_NewRef(source));
  }
  return outputs;
}

PyObject* call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  WholeGraph* whole = as_whole_graph(self);
  if (PyVectorcall_NARGS(nargsf) != 1 || kwnames != nullptr || !PyList_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "a whole graph takes one argument: the argument list");
    return nullptr;
  }
  PyObject* arguments = args[0];
  PyObject* list = partition_arguments(*whole->route, arguments);
  if (list == nullptr) return nullptr;
  auto* partition = reinterpret_cast<GraphedCallable*>(whole->partition);
  const auto [replayed, status] = replay_matching(*partition, list);
  Py_DECREF(list);
  if (status == ReplayStatus::kError) return nullptr;
  if (status != ReplayStatus::kReplayed) return PyObject_CallOneArg(whole->fallback, arguments);
  PyObject* outputs = graph_outputs(*whole->route, replayed, arguments);
  Py_DECREF(replayed);
  return outputs == nullptr ? nullptr : clear_list(arguments, outputs);
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

PyObject* make_whole_graph_callable(PyObject* partition, PyObject* fallback,
                                    std::vector<int> inputs,
                                    const std::vector<std::pair<bool, int>>& outputs) {
  if (!PyObject_TypeCheck(partition, graphed_callable_type())) {
    PyErr_SetString(PyExc_TypeError, "the partition must be a GraphedCallable");
    return nullptr;
  }
  auto* whole = PyObject_GC_New(WholeGraph, whole_graph_type());
  if (whole == nullptr) return nullptr;
  whole->vectorcall = call;
  whole->partition = Py_NewRef(partition);
  whole->fallback = Py_NewRef(fallback);
  whole->route = new Route{std::move(inputs), outputs};
  PyObject_GC_Track(whole);
  return reinterpret_cast<PyObject*>(whole);
}

}  // namespace pygraph
