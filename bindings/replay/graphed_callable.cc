#include "replay/graphed_callable.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <stdexcept>
#include <utility>

#include "replay/held_blocks.h"
#include "replay/replay_clocks.h"
#include "short_checks.h"
#include "torch_private/torch_cuda.h"

namespace pygraph::bindings {
namespace {

GraphedCallable* as_callable(PyObject* object) {
  return reinterpret_cast<GraphedCallable*>(object);
}

// What Python passes. Throws std::invalid_argument.
GraphedCallable& checked(pybind11::handle object) {
  if (PyObject_TypeCheck(object.ptr(), graphed_callable_type()) == 0) {
    throw std::invalid_argument("the engine takes a callable that graphed_callable() has made");
  }
  return *as_callable(object.ptr());
}

std::atomic<bool> g_paused = false;
thread_local const GraphedCallable* t_forced_uncaptured = nullptr;
thread_local const GraphedCallable* t_decided = nullptr;  // not to be followed
thread_local int t_observers = 0;

c10::Device device_of(const GraphedCallable& callable) {
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(callable.device)};
}

constexpr size_t kMostUncapturedDecisions = 256;  // more of them ask at every call

// The decision for such arguments, moved to the front; null if there is none.
Decision* find(std::vector<Decision>& decided, PyObject* arguments, c10::Device device,
               const Switches& now, const OwnInputs* own = nullptr) {
  for (size_t i = 0; i < decided.size(); ++i) {
    if (!decided[i].matches(arguments, device, now, own)) continue;
    if (i > 0) {
      const auto found = decided.begin() + static_cast<ptrdiff_t>(i);
      std::rotate(decided.begin(), found, found + 1);
    }
    return &decided.front();
  }
  return nullptr;
}

// As replay_matching(), of a graph that matches.
std::pair<PyObject*, ReplayStatus> try_replay(CapturedGraph& graph, PyObject* arguments,
                                              Py_ssize_t holders, const GradientOwners& gradients,
                                              const OwnInputs* own) {
  try {
    PyObject* outputs = graph.replay(arguments, holders, -1, std::nullopt, gradients, own);
    return {outputs, outputs != nullptr ? ReplayStatus::kReplayed : ReplayStatus::kError};
  } catch (const DriverError& error) {
    if (error.sticky()) {
      graph.failure = error.what();
      PyErr_SetString(PyExc_RuntimeError, error.what());
      return {nullptr, ReplayStatus::kError};
    }
    graph.fail(error.what());
  } catch (const NotGivenAway&) {
    return {nullptr, ReplayStatus::kNoMatch};
  } catch (const StreamNotReady&) {
    // This call only.
  } catch (const c10::OutOfMemoryError&) {
    graph.note_no_room();  // uncaptured, the same request may find some, or raise
  } catch (const pybind11::error_already_set&) {
    graph
        .note_no_room();  // raised by an observer that was told of it, and again by the call itself
  } catch (const std::exception& error) {
    graph.fail(error.what());
  }
  return {nullptr, ReplayStatus::kUncaptured};
}

size_t hash_of(std::string_view signature) {
  return std::hash<std::string_view>{}(signature);
}

// Whether the call is one that waits: it was made then, with this result.
std::optional<PyObject*> try_waiting(GraphedCallable& callable, PyObject* arguments) {
  if (callable.waiting->empty()) return std::nullopt;
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const size_t hash = hash_of(signature_of(arguments, device_of(callable)));
  if (!callable.waiting->contains(hash)) return std::nullopt;
  PyObject* outputs = PyObject_CallOneArg(callable.uncaptured, arguments);
  const std::chrono::duration<double> taken = Clock::now() - start;
  const auto left = callable.waiting->find(hash);  // again: the call may have changed the map
  if (left != callable.waiting->end() && (left->second -= taken.count()) <= 0) {
    callable.waiting->erase(left);
  }
  return outputs;
}

PyObject* call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  if (PyVectorcall_NARGS(nargsf) != 1 || kwnames != nullptr || !PyList_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "a graphed callable takes one argument: the argument list");
    return nullptr;
  }
  GraphedCallable* callable = as_callable(self);
  ReplayClocks::begin();
  const auto [outputs, status] = replay_matching(*callable, args[0], 1);
  switch (status) {
    case ReplayStatus::kReplayed: {
      PyObject* result = clear_list(args[0], outputs);
      ReplayClocks::end(ReplayPart::kRelease);
      return result;
    }
    case ReplayStatus::kUncaptured:
      return PyObject_CallOneArg(callable->uncaptured, args[0]);
    case ReplayStatus::kNoMatch:
      if (const auto outputs = try_waiting(*callable, args[0])) return *outputs;
      return PyObject_CallOneArg(callable->miss, args[0]);
    case ReplayStatus::kError:
      break;
  }
  return nullptr;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  GraphedCallable* callable = as_callable(self);
  Py_CLEAR(callable->uncaptured);
  Py_CLEAR(callable->miss);
  Py_CLEAR(callable->gradients.tensors);
  delete std::exchange(callable->own, nullptr);
  delete callable->graphs;
  delete callable->uncaptured_decisions;
  delete callable->waiting;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(as_callable(self)->uncaptured);
  Py_VISIT(as_callable(self)->miss);
  Py_VISIT(as_callable(self)->gradients.tensors);
  if (as_callable(self)->own != nullptr) Py_VISIT(as_callable(self)->own->tensors());
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(as_callable(self)->uncaptured);
  Py_CLEAR(as_callable(self)->miss);
  Py_CLEAR(as_callable(self)->gradients.tensors);
  delete std::exchange(as_callable(self)->own, nullptr);
  return 0;
}

PyMemberDef g_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(GraphedCallable, vectorcall), READONLY, nullptr},
    {"uncaptured", T_OBJECT, offsetof(GraphedCallable, uncaptured), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot g_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                         {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                         {Py_tp_clear, reinterpret_cast<void*>(clear)},
                         {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                         {Py_tp_members, g_members},
                         {0, nullptr}};

PyType_Spec g_spec = {"pygraph._engine.GraphedCallable", sizeof(GraphedCallable), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                          Py_TPFLAGS_DISALLOW_INSTANTIATION,
                      g_slots};

bool is_due(Decision& decided) {
  if (decided.calls_per_recheck == 0) return false;
  return ++decided.calls > decided.calls_per_recheck;
}

// As replay_matching(), of a call that may be replayed.
std::pair<PyObject*, ReplayStatus> try_matching(GraphedCallable& callable, PyObject* arguments,
                                                Py_ssize_t holders) {
  // Dispatch modes must see the operators.
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) return {nullptr, ReplayStatus::kNoMatch};
  const c10::Device device = device_of(callable);
  const Switches now = current_switches();
  const bool has_own = callable.own != nullptr && callable.own->read(arguments);
  const OwnInputs* own = has_own ? callable.own : nullptr;
  if (Decision* decided = find(*callable.graphs, arguments, device, now, own)) {
    if (is_due(*decided)) return {nullptr, ReplayStatus::kNoMatch};
    const std::shared_ptr<CapturedGraph> graph = decided->graph;  // survives a concurrent drop
    ReplayClocks::end(ReplayPart::kMatch);
    if (graph->is_out_of_use()) return {nullptr, ReplayStatus::kUncaptured};
    if (graph->is_audit_due()) return {nullptr, ReplayStatus::kNoMatch};
    return try_replay(*graph, arguments, holders, callable.gradients, own);
  }
  if (Decision* decided = find(*callable.uncaptured_decisions, arguments, device, now)) {
    return {nullptr, is_due(*decided) ? ReplayStatus::kNoMatch : ReplayStatus::kUncaptured};
  }
  return {nullptr, ReplayStatus::kNoMatch};
}

}  // namespace

bool Decision::matches(PyObject* list, c10::Device device, const Switches& now,
                       const OwnInputs* own) {
  if (graph != nullptr && own != nullptr) {
    if (own->addresses() == own_addresses) return graph->matches(list, now, own->positions());
    if (!graph->matches(list, now)) return false;
    own_addresses = own->addresses();
    return true;
  }
  if (graph != nullptr) return graph->matches(list, now);
  return switches == now && bindings::matches(arguments, list, device) &&
         are_aligned_alike(arguments, list);
}

std::pair<PyObject*, ReplayStatus> replay_matching(GraphedCallable& callable, PyObject* arguments,
                                                   Py_ssize_t holders) {
  const bool is_decided = std::exchange(t_decided, nullptr) == &callable;
  if (is_decided || t_forced_uncaptured == &callable || t_observers > 0) {
    return {nullptr, ReplayStatus::kUncaptured};
  }
  if (g_paused) {
    HeldBlocks::look();
    return {nullptr, ReplayStatus::kUncaptured};
  }
  try {
    // A capture in progress (the user's own torch.cuda.graph) must absorb the plain kernels.
    if (CapturedGraph::is_entered() || torch_cuda::is_capturing(callable.device)) {
      return {nullptr, ReplayStatus::kUncaptured};
    }
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return {nullptr, ReplayStatus::kError};
  }
  const auto result = try_matching(callable, arguments, holders);
  if (result.second != ReplayStatus::kReplayed) HeldBlocks::look();
  return result;
}

ForceUncaptured::ForceUncaptured(const GraphedCallable* callable) : before_(t_forced_uncaptured) {
  if (callable != nullptr) t_forced_uncaptured = callable;
}

ForceUncaptured::~ForceUncaptured() {
  t_forced_uncaptured = before_;
}

void run_next_call_uncaptured(const GraphedCallable* callable) {
  t_decided = callable;
}

void begin_observed_calls() {
  ++t_observers;
}

void end_observed_calls() {
  --t_observers;
}

PyObject* clear_list(PyObject* list, PyObject* outputs) {
  if (PyList_SetSlice(list, 0, PyList_GET_SIZE(list), nullptr) == 0) return outputs;
  Py_DECREF(outputs);
  return nullptr;
}

PyTypeObject* graphed_callable_type() {
  static auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&g_spec));
  return type;
}

PyObject* make_graphed_callable(PyObject* uncaptured, PyObject* miss, int device) {
  PyTypeObject* type = graphed_callable_type();
  auto* callable = PyObject_GC_New(GraphedCallable, type);
  if (callable == nullptr) return nullptr;
  callable->vectorcall = call;
  callable->uncaptured = Py_NewRef(uncaptured);
  callable->miss = Py_NewRef(miss);
  callable->device = device;
  callable->gradients = {};
  callable->own = nullptr;
  callable->graphs = new std::vector<Decision>;
  callable->uncaptured_decisions = new std::vector<Decision>;
  callable->waiting = new std::unordered_map<size_t, double>;
  PyObject_GC_Track(callable);
  return reinterpret_cast<PyObject*>(callable);
}

void leave_gradients(pybind11::handle callable, const pybind11::list& tensors, Py_ssize_t first) {
  checked(callable).gradients = {Py_NewRef(tensors.ptr()), first};
}

void own_inputs(pybind11::handle callable, const pybind11::list& tensors, Py_ssize_t first) {
  if (!are_checks_short() || tensors.empty()) return;
  delete std::exchange(checked(callable).own, new OwnInputs(tensors, first));
}

// Dropping a graph may release Python's lock, so no graph is dropped while the list changes.
void remove_graph(pybind11::handle callable, const CapturedGraph& graph) {
  auto& graphs = *checked(callable).graphs;
  const auto is_it = [&](const Decision& decided) { return decided.graph.get() == &graph; };
  const auto found = std::ranges::find_if(graphs, is_it);
  if (found == graphs.end()) return;
  const std::shared_ptr<CapturedGraph> dropped = std::move(found->graph);
  graphs.erase(found);
}

std::vector<std::shared_ptr<CapturedGraph>> add_graph(pybind11::handle callable,
                                                      std::shared_ptr<CapturedGraph> graph,
                                                      size_t limit, uint64_t calls_per_recheck) {
  auto& graphs = *checked(callable).graphs;
  remove_graph(callable, *graph);
  graphs.insert(graphs.begin(), {std::move(graph), {}, {}, calls_per_recheck});
  std::vector<std::shared_ptr<CapturedGraph>> dropped;
  while (graphs.size() > limit) {
    dropped.push_back(std::move(graphs.back().graph));
    graphs.pop_back();
  }
  return dropped;
}

void add_uncaptured_decision(pybind11::handle callable, const pybind11::list& list,
                             uint64_t calls_per_recheck) {
  PyObject* arguments = list.ptr();
  const c10::Device device = device_of(checked(callable));
  const Switches now = current_switches();
  auto& decided = *checked(callable).uncaptured_decisions;
  std::erase_if(decided, [&](Decision& old) { return old.matches(arguments, device, now); });
  std::vector<Argument> described = describe_arguments(arguments, device);
  for (const Argument& argument : described) {
    if (argument.kind == ArgumentKind::kUnsupported) return;  // never matches
  }
  decided.insert(decided.begin(), {nullptr, std::move(described), now, calls_per_recheck});
  if (decided.size() > kMostUncapturedDecisions) decided.pop_back();
}

void clear_uncaptured_decisions(pybind11::handle callable) {
  checked(callable).uncaptured_decisions->clear();
}

void wait(pybind11::handle callable, std::string_view signature, double seconds) {
  checked(callable).waiting->insert_or_assign(hash_of(signature), seconds);
}

double waiting_seconds(pybind11::handle callable, std::string_view signature) {
  const auto& waiting = *checked(callable).waiting;
  const auto left = waiting.find(hash_of(signature));
  return left == waiting.end() ? 0 : left->second;
}

void clear_waiting(pybind11::handle callable) {
  checked(callable).waiting->clear();
}

void clear_decisions(pybind11::handle callable) {
  const std::vector<Decision> dropped = std::exchange(*checked(callable).graphs, {});
  clear_uncaptured_decisions(callable);
  clear_waiting(callable);
}

void pause_replays(bool paused) {
  g_paused = paused;
}

}  // namespace pygraph::bindings
