// The callable that replaces a partition's function in a compiled program.
//
// Called with one argument list, as Inductor calls its partitions. If a captured graph matches, the
// call is a replay, in which no Python runs. Otherwise a Python function (Partition._miss) decides
// whether to run uncaptured or to record.
#pragma once

#include <pybind11/pybind11.h>
#include <structmember.h>

#include <memory>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "replay/captured_graph.h"

namespace pygraph::bindings {

// The decision for one signature of the arguments.
struct Decision {
  std::shared_ptr<CapturedGraph> graph;  // null: such calls run uncaptured
  std::vector<Argument> arguments;       // that run uncaptured; a graph has its own
  Switches switches;                     // alike
  // The number of calls after which the decision is rechecked (0: never); `calls` were made so far.
  uint64_t calls_per_recheck = 0;
  uint64_t calls = 0;
  std::vector<uint64_t> own_addresses{};  // of own inputs when they last matched the graph

  // `own`: inputs among the arguments whose addresses have been read, or null.
  bool matches(PyObject* list, c10::Device device, const Switches& now,
               const OwnInputs* own = nullptr);
};

struct GraphedCallable {
  PyObject_HEAD vectorcallfunc vectorcall;
  // Runs the function uncaptured: takes the argument list, returns the outputs.
  PyObject* uncaptured;
  // Called with the argument list if there is no decision for such arguments, or if a recheck or an
  // audit is due; returns the outputs.
  PyObject* miss;
  int device;
  GradientOwners gradients;  // whose gradients its replays leave; holds a reference to the list
  OwnInputs* own;            // or null
  // Each most recently used first.
  std::vector<Decision>* graphs;
  std::vector<Decision>* uncaptured_decisions;
  // By hash of the signature: seconds of host time that such calls may still use uncaptured before
  // Python is called.
  std::unordered_map<size_t, double>* waiting;
};

// Creates the type; null with a Python error set on failure.
PyTypeObject* graphed_callable_type();

enum class ReplayStatus : uint8_t {
  kReplayed,
  kNoMatch,     // or due for a recheck or an audit
  kUncaptured,  // decided so, or this call must not replay
  kError        // a Python error is set
};

// Replays the graph that matches, if any. The outputs are a new reference, null unless kReplayed.
// The argument list is left as it is; tensors of which the call's own lists, `holders` of them,
// hold the only references may have lost their memory to the outputs when a graph was replayed.
std::pair<PyObject*, ReplayStatus> replay_matching(GraphedCallable& callable, PyObject* arguments,
                                                   Py_ssize_t holders);

// While it exists, calls of `callable` from this thread run uncaptured without a decision. After a
// shortcut (whole_graph.h) got kUncaptured, it calls PyTorch's function, which ends at the same
// callable; without this, the callable would decide about the call, and count it, a second time.
class ForceUncaptured {
 public:
  explicit ForceUncaptured(const GraphedCallable* callable);  // null: nothing changes
  ~ForceUncaptured();
  ForceUncaptured(const ForceUncaptured&) = delete;
  ForceUncaptured& operator=(const ForceUncaptured&) = delete;

 private:
  const GraphedCallable* before_;
};

// The next call from this thread of any graphed callable runs uncaptured without a decision if it
// is a call of `callable` (null: of none): that is the call for which replay_matching() has
// returned kUncaptured already, and Python makes it.
void run_next_call_uncaptured(const GraphedCallable* callable);

// From begin to end, all calls from this thread run uncaptured: something observes their operators,
// which a replay has none of. Neither is a call counted, recorded or watched for side effects,
// which would show operators of PyGraph's.
void begin_observed_calls();
void end_observed_calls();

// Empties the argument list, as compiled functions do: inputs that nothing else holds are freed, in
// stream order. Returns `outputs`, or null with an error set.
PyObject* clear_list(PyObject* list, PyObject* outputs);

// All need Python's lock. `callable`: a GraphedCallable; else std::invalid_argument is thrown.
PyObject* make_graphed_callable(PyObject* uncaptured, PyObject* miss, int device);
// Lets replays leave the gradients of `tensors`: the outputs from `first` on. Once, before the
// first call.
void leave_gradients(pybind11::handle callable, const pybind11::list& tensors, Py_ssize_t first);
// Says that nobody else has the tensors, and that they are the arguments from `first` on in each
// call. Before the first call. Throws std::invalid_argument.
void own_inputs(pybind11::handle callable, const pybind11::list& tensors, Py_ssize_t first);
// Adds a graph in front, with a new decision, and returns the graphs beyond `limit`, least recently
// used last, taken out.
std::vector<std::shared_ptr<CapturedGraph>> add_graph(pybind11::handle callable,
                                                      std::shared_ptr<CapturedGraph> graph,
                                                      size_t limit, uint64_t calls_per_recheck);
void remove_graph(pybind11::handle callable, const CapturedGraph& graph);
// Lets calls with arguments like these run uncaptured, without calling Python, until a recheck is
// due.
void add_uncaptured_decision(pybind11::handle callable, const pybind11::list& arguments,
                             uint64_t calls_per_recheck);
void clear_uncaptured_decisions(pybind11::handle callable);
// Lets calls of this signature (from signature_of) run uncaptured, without calling Python, until
// they have used `seconds` of host time. Two signatures with one hash share the time, which is
// harmless.
void wait(pybind11::handle callable, std::string_view signature, double seconds);
// The rest of that time; 0 if there is none.
double waiting_seconds(pybind11::handle callable, std::string_view signature);
void clear_waiting(pybind11::handle callable);
// Forgets all decisions.
void clear_decisions(pybind11::handle callable);

// While paused no graph of the process is replayed: all calls run uncaptured. For measurements.
void pause_replays(bool paused);

}  // namespace pygraph::bindings
