#include "callables/served_calls.h"

#include <structmember.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "callables/known_call.h"
#include "callables/modes.h"
#include "callables/thread_call.h"
#include "conversions.h"
#include "replay/graphed_callable.h"
#include "replay/replay_clocks.h"
#include "short_checks.h"

namespace py = pybind11;

namespace pygraph::bindings {
namespace {

constexpr size_t kMostKinds = 8;

using KnownCalls = std::vector<std::shared_ptr<KnownCall>>;

struct ServedCalls {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* inside;
  PyObject* own;
  PyObject* variables;
  PyObject* transform;
  KnownCalls* known;  // most recently used first
  uint64_t served;    // calls, since they were counted last
};

ServedCalls* as_served(PyObject* object) {
  return reinterpret_cast<ServedCalls*>(object);
}

bool is_expected(PyObject* value, PyObject* expected) {
  if (expected == Py_None) return PyDict_Check(value) && PyDict_GET_SIZE(value) == 0;
  if (value == expected) return true;
  return PyLong_CheckExact(value) && PyObject_RichCompareBool(value, expected, Py_EQ) == 1;
}

// As serving.may_be_served() in Python, but for what is known of the process, and whether a stream
// captures, which the replay asks.
bool may_be_served(const ServedCalls& served) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(served.variables); ++i) {
    PyObject* variable = PyList_GET_ITEM(served.variables, i);
    PyObject* value =
        PyDict_GetItemWithError(PyTuple_GET_ITEM(variable, 0), PyTuple_GET_ITEM(variable, 1));
    if (value == nullptr || !is_expected(value, PyTuple_GET_ITEM(variable, 2))) {
      PyErr_Clear();
      return false;
    }
  }
  if (are_operators_watched()) return false;
  return steal(PyObject_CallNoArgs(served.transform)).is_none();
}

// Other threads, and code that runs meanwhile, may have changed the list.
void forget(ServedCalls& served, const std::shared_ptr<KnownCall>& known) {
  std::erase(*served.known, known);
}

void move_to_front(ServedCalls& served, const std::shared_ptr<KnownCall>& known) {
  const auto found = std::ranges::find(*served.known, known);
  if (found != served.known->end()) std::rotate(served.known->begin(), found, found + 1);
}

// The result in a tuple; null if the graph did not serve the call.
py::object replayed(ServedCalls& served, KnownCall& known, const CallInputs& inputs) {
  const py::list arguments = known.arguments(inputs);
  ReplayClocks::end(ReplayPart::kInputs);
  const py::object outputs = known.replay(inputs, arguments);
  if (!outputs) return {};
  Calling::note_made(served.inside);
  py::tuple result = known.finish(inputs, outputs);
  ReplayClocks::end(ReplayPart::kResult);
  return std::move(result);
}

py::object serve(ServedCalls& served, const py::tuple& args, const py::dict& kwargs) {
  ReplayClocks::begin();
  run_next_call_uncaptured(nullptr);
  if (served.known->empty() || Calling::is(served.inside)) return py::none();
  if (!may_be_served(served)) return py::none();
  const Calling calling(served.inside);
  const ThreadLock lock(served.own);
  if (!lock.is_taken()) return py::none();
  ReplayClocks::end(ReplayPart::kMayBeServed);
  for (size_t i = 0; i < served.known->size(); ++i) {
    const std::shared_ptr<KnownCall> known = (*served.known)[i];
    CallInputs inputs;
    if (!known->fits(args, kwargs, inputs)) continue;
    py::object result = replayed(served, *known, inputs);
    if (!result) {
      forget(served, known);  // until Python has seen it served again
      break;
    }
    ++served.served;
    if (i > 0) move_to_front(served, known);
    return result;
  }
  return py::none();
}

PyObject* call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  if (PyVectorcall_NARGS(nargsf) != 2 || names != nullptr || !PyTuple_CheckExact(args[0]) ||
      !PyDict_CheckExact(args[1])) {
    PyErr_SetString(PyExc_TypeError, "served calls take a tuple and a dictionary");
    return nullptr;
  }
  return returning_errors([&] {
    return serve(*as_served(self), py::reinterpret_borrow<py::tuple>(args[0]),
                 py::reinterpret_borrow<py::dict>(args[1]))
        .release()
        .ptr();
  });
}

int clear(PyObject* self) {
  ServedCalls* served = as_served(self);
  Py_CLEAR(served->inside);
  Py_CLEAR(served->own);
  Py_CLEAR(served->variables);
  Py_CLEAR(served->transform);
  const KnownCalls dropped = std::exchange(*served->known, {});
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  delete as_served(self)->known;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  const ServedCalls* served = as_served(self);
  Py_VISIT(served->inside);
  Py_VISIT(served->own);
  Py_VISIT(served->variables);
  Py_VISIT(served->transform);
  for (const auto& known : *served->known) Py_VISIT(known->held());
  Py_VISIT(Py_TYPE(self));
  return 0;
}

PyMemberDef g_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(ServedCalls, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot g_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                         {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                         {Py_tp_clear, reinterpret_cast<void*>(clear)},
                         {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                         {Py_tp_members, g_members},
                         {0, nullptr}};

PyType_Spec g_spec = {"pygraph._engine.ServedCalls", sizeof(ServedCalls), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                          Py_TPFLAGS_DISALLOW_INSTANTIATION,
                      g_slots};

PyTypeObject* served_calls_type() {
  static auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&g_spec));
  return type;
}

ServedCalls& checked(py::handle object) {
  if (PyObject_TypeCheck(object.ptr(), served_calls_type()) == 0) {
    throw std::invalid_argument("the engine takes what served_calls() has made");
  }
  return *as_served(object.ptr());
}

}  // namespace

py::object make_served_calls(const py::object& inside, const py::object& own,
                             const py::list& variables, const py::object& transform) {
  for (const py::handle variable : variables) {
    if (!PyTuple_CheckExact(variable.ptr()) || PyTuple_GET_SIZE(variable.ptr()) != 3 ||
        !PyDict_Check(PyTuple_GET_ITEM(variable.ptr(), 0))) {
      throw std::invalid_argument("a variable has a namespace, a name and a value");
    }
  }
  auto* served = PyObject_GC_New(ServedCalls, served_calls_type());
  if (served == nullptr) throw py::error_already_set();
  served->vectorcall = call;
  served->inside = Py_NewRef(inside.ptr());
  served->own = Py_NewRef(own.ptr());
  served->variables = Py_NewRef(variables.ptr());
  served->transform = Py_NewRef(transform.ptr());
  served->known = new KnownCalls;
  served->served = 0;
  PyObject_GC_Track(served);
  return steal_object(reinterpret_cast<PyObject*>(served));
}

void add_known_call(py::handle served, const py::dict& kind) {
  KnownCalls& known = *checked(served).known;
  const bool is_cleared = checked(served).inside == nullptr;  // by the garbage collector
  if (is_cleared || !are_checks_short()) return;
  known.insert(known.begin(), std::make_shared<KnownCall>(kind));
  if (known.size() <= kMostKinds) return;
  const std::shared_ptr<KnownCall> dropped = std::move(known.back());
  known.pop_back();
}

// What is dropped may run code as it goes, so it goes when the list is as it should be.
void forget_known_calls(py::handle served, py::handle owner) {
  KnownCalls& known = *checked(served).known;
  KnownCalls kept;
  for (const auto& call : known) {
    if (!owner.is_none() && !call->is_of(owner)) kept.push_back(call);
  }
  known.swap(kept);
}

uint64_t take_served_count(py::handle served) {
  return std::exchange(checked(served).served, 0);
}

}  // namespace pygraph::bindings
