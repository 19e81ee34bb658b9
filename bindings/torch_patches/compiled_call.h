// A call of a compiled function or module, up to Dynamo's guards.
//
// `torch.compile` returns a Python function that checks for tracing, export and a changed stance of
// Dynamo, installs the compiler for the frames that follow, and calls the original function. For a
// module it returns a module around that: each call passes `nn.Module.__call__` twice, once for
// either. That is most of the host time of a small graph's call. This file does the same without
// Python in the usual case: no hooks, no tracing, the default stance. Any other call takes
// PyTorch's way.
//
// All of this reads PyTorch's private state: it is used only where the source of what it replaces
// is the known one (the patch `compiled_call` in python/pygraph/torch_patches/table.py). The GIL is
// held throughout.
#pragma once

#include <Python.h>

namespace pygraph::bindings {

// What `make_compiled_call` needs of one compiled function.
struct CompiledFunction {
  PyObject* wrapper;        // PyTorch's, for calls that are not the usual
  PyObject* function;       // the original, whose frames are compiled
  PyObject* module;         // of which `function` is the bound `__call__`; or None
  PyObject* callback;       // Dynamo's, as set_eval_frame takes it
  PyObject* enter_hooks;    // a list; the usual one has one element, which counts a generation
  PyObject* full_graph;     // a bool
  PyObject* raise_to_user;  // called with an exception of Dynamo's: raises it as PyTorch shows it
};

// A new reference to a builtin function that does what `wrapper` does. Null, with a Python error
// set, where PyTorch lacks what it reads.
PyObject* make_compiled_call(const CompiledFunction& compiled);

// A new reference to a `__call__` for the type of compiled modules. A module whose `forward` is a
// Python function with such a builtin in its attribute kCompiledCall is called without Python in
// between; any other by `original`, the type's `__call__`. For one type per process.
PyObject* make_module_call(PyTypeObject* type, PyObject* original);

inline constexpr const char* kCompiledCall = "_pygraph_compiled_call";

}  // namespace pygraph::bindings
