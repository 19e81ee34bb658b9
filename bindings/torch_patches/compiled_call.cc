#include "torch_patches/compiled_call.h"

#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <array>

#include "conversions.h"
#include "torch_patches/dynamo_state.h"

namespace py = pybind11;

namespace pygraph::bindings {
namespace {

// make_compiled_call() keeps a CompiledFunction in a tuple, which Python's garbage collector knows.
enum Part : uint8_t {
  kWrapper,
  kFunction,
  kModule,
  kCallback,
  kEnterHooks,
  kFullGraph,
  kRaiseToUser
};

PyObject* part(PyObject* compiled, Part which) {
  return PyTuple_GET_ITEM(compiled, which);
}

struct Names {
  std::array<PyObject*, 4> hooks = {intern("_backward_hooks"), intern("_backward_pre_hooks"),
                                    intern("_forward_hooks"), intern("_forward_pre_hooks")};
  std::array<PyObject*, 6> global_hooks = {
      intern("_global_backward_pre_hooks"),          intern("_global_backward_hooks"),
      intern("_global_forward_pre_hooks"),           intern("_global_forward_hooks"),
      intern("_global_forward_hooks_always_called"), intern("_global_forward_hooks_with_kwargs")};
  PyObject* compiled_call_impl = intern("_compiled_call_impl");
  PyObject* call = intern("__call__");
  PyObject* call_impl = intern("_call_impl");
  PyObject* forward = intern("forward");
  PyObject* compiled_call = intern(kCompiledCall);
};

const Names& names() {
  static const auto* names = new Names;
  return *names;
}

bool is_empty(const py::handle& dict, PyObject* key) {
  PyObject* hooks = get(dict, key);
  return hooks != nullptr && PyDict_Check(hooks) && PyDict_GET_SIZE(hooks) == 0;
}

bool has_no_hooks(const py::handle& module_dict) {
  for (PyObject* hooks : names().hooks) {
    if (!is_empty(module_dict, hooks)) return false;
  }
  PyObject* compiled = get(module_dict, names().compiled_call_impl);  // by nn.Module.compile()
  return compiled == nullptr || compiled == Py_None;
}

bool has_no_global_hooks() {
  for (PyObject* hooks : names().global_hooks) {
    if (!is_empty(dynamo_state().modules, hooks)) return false;
  }
  return true;
}

// Whether calls of such modules are nn.Module's own, which may have been replaced (torch.fx does).
bool is_called_as_usual(PyTypeObject* type) {
  const DynamoState& state = dynamo_state();
  return _PyType_Lookup(type, names().call) == state.module_call.ptr() &&
         _PyType_Lookup(type, names().call_impl) == state.module_call_impl.ptr();
}

// The module's `forward`, if a call of the module would only call it; else null.
py::object plain_forward(PyObject* module) {
  if (!is_called_as_usual(Py_TYPE(module)) || !has_no_global_hooks()) return {};
  const py::object dict = steal_object(PyObject_GenericGetDict(module, nullptr));
  if (!dict || !has_no_hooks(dict) || get(dict, names().call_impl) != nullptr) return {};
  return steal_object(PyObject_GetAttr(module, names().forward));
}

// Arguments as vectorcall has them. Errors are thrown as error_already_set, or set with null
// returned.
PyObject* call_compiled(PyObject* compiled, PyObject* const* args, Py_ssize_t count,
                        PyObject* keywords) {
  const bool usual = PyList_GET_SIZE(part(compiled, kEnterHooks)) == 1 && can_take_fast_path() &&
                     count_generation();
  PyErr_Clear();  // what could not be read is not usual
  if (!usual) return PyObject_Vectorcall(part(compiled, kWrapper), args, count, keywords);
  PyObject* module = part(compiled, kModule);
  const py::object forward = module == Py_None ? py::object() : plain_forward(module);
  PyErr_Clear();
  PyObject* function = forward ? forward.ptr() : part(compiled, kFunction);
  PyObject* result = nullptr;
  {
    const InstalledCallback installed(part(compiled, kCallback),
                                      part(compiled, kFullGraph) == Py_True);
    result = PyObject_Vectorcall(function, args, count, keywords);
  }
  if (result == nullptr && PyErr_ExceptionMatches(dynamo_state().rewritten_exceptions.ptr()) != 0) {
    const py::error_already_set error;
    py::reinterpret_borrow<py::object>(part(compiled, kRaiseToUser))(error.value());
  }
  return result;
}

PyObject* compiled_call(PyObject* compiled, PyObject* const* args, Py_ssize_t count,
                        PyObject* keywords) {
  return returning_errors([&] { return call_compiled(compiled, args, count, keywords); });
}

PyCFunction as_method(_PyCFunctionFastWithKeywords function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef g_compiled_call = {"compiled_call", as_method(&compiled_call),
                               METH_FASTCALL | METH_KEYWORDS, "A call of a compiled function."};

// The state that make_compiled_call() keeps for a module's `forward`, borrowed; or null.
PyObject* compiled_forward(const py::handle& module_dict) {
  PyObject* forward = get(module_dict, names().forward);
  if (forward == nullptr || !PyFunction_Check(forward)) return nullptr;
  PyObject* attributes = reinterpret_cast<PyFunctionObject*>(forward)->func_dict;
  PyObject* call = attributes == nullptr ? nullptr : get(attributes, names().compiled_call);
  const bool is_ours = call != nullptr && PyCFunction_Check(call) &&
                       PyCFunction_GET_FUNCTION(call) == g_compiled_call.ml_meth;
  return is_ours ? PyCFunction_GET_SELF(call) : nullptr;
}

// The arguments of make_module_call().
PyTypeObject* g_type = nullptr;
PyObject* g_original = nullptr;

PyObject* call_original(PyObject* self, PyObject* const* args, Py_ssize_t count,
                        PyObject* keywords) {
  const Py_ssize_t total = count + (keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords));
  c10::SmallVector<PyObject*, 16> all{self};
  all.append(args, args + total);
  return PyObject_Vectorcall(g_original, all.data(), count + 1, keywords);
}

bool passes_only_through(const py::handle& module_dict) {
  auto* module_type = reinterpret_cast<PyTypeObject*>(dynamo_state().module_type.ptr());
  return has_no_hooks(module_dict) && has_no_global_hooks() && is_called_as_usual(module_type) &&
         !torch::jit::tracer::isTracing();
}

PyObject* module_call(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  return returning_errors([&] {
    const py::object dict = steal_object(PyObject_GenericGetDict(self, nullptr));
    const auto compiled = py::reinterpret_borrow<py::object>(  // held: `forward` may be replaced
        dict && Py_TYPE(self) == g_type ? compiled_forward(dict) : nullptr);
    if (!compiled || !passes_only_through(dict)) {
      PyErr_Clear();
      return call_original(self, args, count, keywords);
    }
    const InOptimizedModule flag;
    return call_compiled(compiled.ptr(), args, count, keywords);
  });
}

PyMethodDef g_module_call = {"__call__", as_method(&module_call), METH_FASTCALL | METH_KEYWORDS,
                             "__call__($self, /, *args, **kwargs)\n--\n\nCalls the module."};

}  // namespace

PyObject* make_compiled_call(const CompiledFunction& compiled) {
  return returning_errors([&]() -> PyObject* {
    dynamo_state();  // all of it is there
    const py::object parts = steal_object(
        PyTuple_Pack(7, compiled.wrapper, compiled.function, compiled.module, compiled.callback,
                     compiled.enter_hooks, compiled.full_graph, compiled.raise_to_user));
    return parts ? PyCFunction_New(&g_compiled_call, parts.ptr()) : nullptr;
  });
}

PyObject* make_module_call(PyTypeObject* type, PyObject* original) {
  g_type = type;
  Py_XSETREF(g_original, Py_NewRef(original));
  return PyDescr_NewMethod(type, &g_module_call);
}

}  // namespace pygraph::bindings
