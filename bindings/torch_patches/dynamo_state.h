// The state that PyTorch's Python wrapper around a compiled function reads and sets, for
// compiled_call.h.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>

namespace pygraph::bindings {

// The parts of PyTorch's private state that are read or set. One per process, never freed.
struct DynamoState {
  pybind11::dict dynamo;   // globals of torch._dynamo.eval_frame
  pybind11::dict modules;  // and of torch.nn.modules.module
  pybind11::dict compiler;
  pybind11::dict fx;
  pybind11::object fx_tls;       // thread-local values: of torch.fx, from PyTorch 2.14 on
  pybind11::object guards_tls;   // of torch._guards
  pybind11::object nesting_tls;  // of nested compilations, from 2.14 on
  pybind11::object generations;  // Dynamo's GenerationTracker
  pybind11::object set_eval_frame;
  pybind11::object set_skips_guards;
  pybind11::object set_override;  // before 2.12, with wanted_override
  pybind11::object wanted_override;
  pybind11::object set_isolation;  // from 2.13 on
  pybind11::object functorch_depth;
  pybind11::object pop_functorch_to;
  pybind11::tuple
      rewritten_exceptions;      // exceptions that the wrapper changes before the user sees them
  pybind11::object module_type;  // torch.nn.Module, and how it is called
  pybind11::object module_call;
  pybind11::object module_call_impl;
};

// Throws error_already_set where PyTorch lacks one of them.
const DynamoState& dynamo_state();

// Interned names, for lookups that compare pointers.
inline PyObject* intern(const char* text) {
  return PyUnicode_InternFromString(text);
}

// The value of a key, borrowed; null if there is none.
inline PyObject* get(const pybind11::handle& dict, PyObject* key) {
  return PyDict_GetItemWithError(dict.ptr(), key);
}

// Whether there is no tracing, no export, and no changed stance of Dynamo. A Python error may be
// set if not.
bool can_take_fast_path();

// What the one hook does that each compiled call has (install_generation_tagging_init). Its first
// call in a process, which changes nn.Module too, is left to PyTorch's wrapper: false.
bool count_generation();

// Dynamo's state while the frames of one compiled call run, as the wrapper sets it, in its order.
// From PyTorch 2.12 on, programs that must be one graph are not called this way, and from 2.13 on
// none whose recompilations are isolated.
class InstalledCallback {
 public:
  // full_graph: whether the program must be one graph. Throws error_already_set.
  InstalledCallback(PyObject* callback, bool full_graph);
  ~InstalledCallback();  // a Python error that is set stays
  InstalledCallback(const InstalledCallback&) = delete;
  InstalledCallback& operator=(const InstalledCallback&) = delete;

 private:
  pybind11::object before_;
  pybind11::object override_before_;
  pybind11::object skipped_before_;
  pybind11::object isolation_before_;
  pybind11::object layers_;  // of function transforms: an error may leave some behind
  c10::impl::LocalDispatchKeySet keys_;
};

// The flag by which PyTorch knows that a compiled module is being called.
class InOptimizedModule {
 public:
  InOptimizedModule();
  ~InOptimizedModule();  // a Python error that is set stays
  InOptimizedModule(const InOptimizedModule&) = delete;
  InOptimizedModule& operator=(const InOptimizedModule&) = delete;

 private:
  pybind11::object before_;
};

}  // namespace pygraph::bindings
