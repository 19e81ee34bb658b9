// What is known of calls of a graphed callable that are like one that a graph has served.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

#include "callables/argument_form.h"
#include "callables/host_watch.h"
#include "callables/state.h"
#include "callables/state_tensors.h"

namespace pygraph::bindings {

// The arguments of one call, taken apart, and the gradients and rates that it uses.
struct CallInputs {
  pybind11::list tensors;    // that are passed
  pybind11::list gradients;  // from before the call
  pybind11::list rates;
};

// To be used with Python's lock. Each function throws error_already_set for what Python raises.
class KnownCall {
 public:
  // `kind`: python/pygraph/callables/known_call.py; is held. Throws std::invalid_argument.
  explicit KnownCall(const pybind11::dict& kind);

  // Fills `inputs`. False if the call is not of this kind, or if anything that the graph depends on
  // is not as it was.
  bool fits(const pybind11::tuple& args, const pybind11::dict& kwargs, CallInputs& inputs);

  // The list of arguments for the graph.
  pybind11::list arguments(const CallInputs& inputs);

  // Replays the graph, and consumes the list. Null if it does not serve the call.
  pybind11::object replay(const CallInputs& inputs, const pybind11::list& arguments);

  // After a replay: tells autograd what was written, leaves gradients, and returns the result in a
  // tuple. `outputs`: a list or a tuple.
  pybind11::tuple finish(const CallInputs& inputs, const pybind11::object& outputs) const;

  bool is_of(pybind11::handle owner) const { return owner.ptr() == owner_; }
  // Has all that is held; for Python's garbage collector.
  PyObject* held() const { return kind_.ptr(); }

 private:
  PyObject* part(const char* name, PyTypeObject* type) const;
  bool rates_now(std::vector<uint64_t>& bits) const;
  bool read_rates(CallInputs& inputs);
  void keep(const pybind11::list& arguments, Py_ssize_t passed);
  void leave_gradients(const pybind11::object& outputs) const;

  pybind11::dict kind_;
  // Borrowed from it.
  PyObject* owner_;
  const ArgumentForm* form_;
  const State* state_;
  HostWatch* watch_;
  PyObject* probes_hold_;     // a function, or None
  PyObject* differentiated_;  // tensors
  PyObject* used_;            // tensors
  PyObject* groups_;          // dictionaries
  PyObject* make_rates_;      // a function
  PyObject* state_tensors_;
  PyObject* written_state_;
  PyObject* written_arguments_;
  PyObject* beside_;      // tensors whose gradients lie in the memory of neighbours_
  PyObject* neighbours_;  // tensors
  PyObject* sharing_;     // tensors whose gradients lie in one memory with those of shared_with_
  PyObject* shared_with_;
  PyObject* counted_;  // tensors whose gradients are written
  PyObject* written_neighbours_;
  PyObject* made_;
  PyObject* cleared_;
  PyObject* result_of_;  // a function, or None
  PyObject* replay_;     // a GraphedCallable, or a function
  std::string layouts_;  // of the gradients of used_
  Py_ssize_t result_count_;
  StateTensors tensors_;

  std::vector<uint64_t> rates_;  // the bits of the rates when they were read last
  pybind11::list rate_tensors_;  // of these
  // The list of arguments of a call that is over, with the tensors of the state alone; or null.
  pybind11::object last_;
};

}  // namespace pygraph::bindings
