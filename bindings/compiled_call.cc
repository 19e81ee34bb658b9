#include "compiled_call.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <vector>

namespace py = pybind11;

namespace pygraph {
namespace {

PyObject* name(const char* text) {
  return PyUnicode_InternFromString(text);
}

py::object attribute_of(const char* module, const char* name) {
  return py::module_::import(module).attr(name);
}

py::object steal(PyObject* object) {
  return py::reinterpret_steal<py::object>(object);
}

// What of PyTorch a call reads and calls. Made once, when all of it has been imported.
struct PyTorch {
  py::object dynamo = attribute_of("torch._dynamo.eval_frame", "__dict__");
  py::object compiler = attribute_of("torch.compiler", "__dict__");
  py::object fx = attribute_of("torch.fx._symbolic_trace", "__dict__");
  py::object modules = attribute_of("torch.nn.modules.module", "__dict__");
  py::object of_thread = attribute_of("torch._guards", "_TLS");
  py::object generations = attribute_of("torch._dynamo.mutation_guard", "GenerationTracker");
  py::object set_eval_frame = attribute_of("torch._C._dynamo.eval_frame", "set_eval_frame");
  py::object set_skips_guards =
      attribute_of("torch._C._dynamo.eval_frame", "set_skip_guard_eval_unsafe");
  py::object set_override = attribute_of("torch._C._dynamo.eval_frame", "set_eval_frame_override");
  py::object wanted_override = attribute_of("torch._dynamo.eval_frame", "_get_eval_frame_override");
  py::object count_layers = attribute_of("torch._C._functorch", "get_dynamic_layer_stack_depth");
  py::object undo_layers =
      attribute_of("torch._C._functorch", "pop_dynamic_layer_stack_and_undo_to_depth");
  py::object shown_otherwise =
      py::make_tuple(attribute_of("torch._dynamo.exc", "Unsupported"),
                     attribute_of("torch._dynamo.exc", "UncapturedHigherOrderOpError"),
                     attribute_of("torch._dynamo.exc", "ShortenTraceback"));
  py::object module_type = attribute_of("torch.nn", "Module");
  py::object module_call = module_type.attr("__call__");
  py::object module_call_impl = module_type.attr("_call_impl");
};

const PyTorch& pytorch() {
  static const auto* pytorch = new PyTorch;
  return *pytorch;
}

// Where make_compiled_call() keeps a CompiledFunction: in a tuple, which Python's collector knows.
enum Part : Py_ssize_t {
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

// Borrowed; null, without a Python error set, if there is no such key.
PyObject* get(const py::handle& dict, PyObject* key) {
  return PyDict_GetItemWithError(dict.ptr(), key);
}

bool is_empty(const py::handle& dict, PyObject* key) {
  PyObject* hooks = get(dict, key);
  return hooks != nullptr && PyDict_Check(hooks) && PyDict_GET_SIZE(hooks) == 0;
}

bool is_default(PyObject* stance) {
  static PyObject* const kStance = name("stance");
  static PyObject* const kSkips = name("skip_guard_eval_unsafe");
  static PyObject* const kBackend = name("backend");
  if (stance == nullptr) return false;
  const py::object value = steal(PyObject_GetAttr(stance, kStance));
  return value && PyUnicode_CompareWithASCIIString(value.ptr(), "default") == 0 &&
         steal(PyObject_GetAttr(stance, kSkips)).is(py::handle(Py_False)) &&
         steal(PyObject_GetAttr(stance, kBackend)).is_none();
}

// Whether nobody asks for another way than the usual. Looks at what PyTorch's wrapper looks at.
bool is_usual(PyObject* compiled) {
  static PyObject* const kExporting = name("_is_exporting_flag");
  static PyObject* const kFx = name("_is_fx_tracing_flag");
  static PyObject* const kStance = name("_stance");
  static PyObject* const kDict = name("__dict__");
  static PyObject* const kTracing = name("tracing_context");
  const PyTorch& torch = pytorch();
  if (PyList_GET_SIZE(part(compiled, kEnterHooks)) != 1 || torch::jit::tracer::isTracing() ||
      get(torch.compiler, kExporting) != Py_False || get(torch.fx, kFx) != Py_False ||
      !is_default(get(torch.dynamo, kStance))) {
    return false;
  }
  const py::object of_thread = steal(PyObject_GetAttr(torch.of_thread.ptr(), kDict));
  PyObject* context = of_thread ? get(of_thread, kTracing) : Py_True;
  return context == nullptr || context == Py_None;
}

// What the one usual hook does, install_generation_tagging_init(). Its first call in a process,
// which changes nn.Module too, is left to PyTorch's wrapper: false.
bool count_generation() {
  static PyObject* const kNeedsPatch = name("___needs_generation_tag_patch");
  static PyObject* const kGeneration = name("generation");
  static PyObject* const kOne = PyLong_FromLong(1);
  static bool is_patched = false;
  const PyTorch& torch = pytorch();
  if (!is_patched) {
    is_patched =
        steal(PyObject_GetAttr(torch.module_type.ptr(), kNeedsPatch)).is(py::handle(Py_False));
    if (!is_patched) return false;
  }
  const py::object now = steal(PyObject_GetAttr(torch.generations.ptr(), kGeneration));
  const py::object next = steal(now ? PyNumber_Add(now.ptr(), kOne) : nullptr);
  return next && PyObject_SetAttr(torch.generations.ptr(), kGeneration, next.ptr()) == 0;
}

py::object call(const py::object& function, PyObject* argument) {
  py::object result = steal(PyObject_CallOneArg(function.ptr(), argument));
  if (!result) throw py::error_already_set();
  return result;
}

// Dynamo's state while the frames of one compiled call run, as PyTorch's wrapper sets it.
class Installed {
 public:
  explicit Installed(PyObject* compiled)
      : before_(call(pytorch().set_eval_frame, Py_None)), layers_(pytorch().count_layers()) {
    const PyTorch& torch = pytorch();
    if (part(compiled, kFullGraph) == Py_True) {
      override_before_ = call(torch.set_override, torch.wanted_override().ptr());
    }
    skipped_before_ = call(torch.set_skips_guards, Py_False);
    call(torch.set_eval_frame, part(compiled, kCallback));
  }

  ~Installed() {
    const py::error_scope error;  // the call's own stays
    const PyTorch& torch = pytorch();
    set(torch.set_eval_frame, Py_None);
    if (override_before_) set(torch.set_override, override_before_.ptr());
    if (!torch.count_layers().equal(layers_)) set(torch.undo_layers, layers_.ptr());
    set(torch.set_skips_guards, skipped_before_.ptr());
    set(torch.set_eval_frame, before_.ptr());
  }

  Installed(const Installed&) = delete;
  Installed& operator=(const Installed&) = delete;

 private:
  static void set(const py::object& function, PyObject* value) {
    Py_XDECREF(PyObject_CallOneArg(function.ptr(), value));
  }

  py::object before_;
  py::object override_before_;
  py::object skipped_before_;
  py::object layers_;  // of function transforms: an error may leave some behind
};

bool has_no_hooks(const py::handle& module_dict) {
  static PyObject* const kHooks[] = {name("_backward_hooks"), name("_backward_pre_hooks"),
                                     name("_forward_hooks"), name("_forward_pre_hooks")};
  static PyObject* const kCompiledCallImpl = name("_compiled_call_impl");
  for (PyObject* hooks : kHooks) {
    if (!is_empty(module_dict, hooks)) return false;
  }
  PyObject* compiled = get(module_dict, kCompiledCallImpl);  // by nn.Module.compile()
  return compiled == nullptr || compiled == Py_None;
}

bool has_no_global_hooks() {
  static PyObject* const kHooks[] = {
      name("_global_backward_pre_hooks"),          name("_global_backward_hooks"),
      name("_global_forward_pre_hooks"),           name("_global_forward_hooks"),
      name("_global_forward_hooks_always_called"), name("_global_forward_hooks_with_kwargs")};
  for (PyObject* hooks : kHooks) {
    if (!is_empty(pytorch().modules, hooks)) return false;
  }
  return true;
}

// Whether calls of such modules are nn.Module's, which somebody may have replaced (torch.fx does).
bool is_called_as_usual(PyTypeObject* type) {
  static PyObject* const kCall = name("__call__");
  static PyObject* const kCallImpl = name("_call_impl");
  return _PyType_Lookup(type, kCall) == pytorch().module_call.ptr() &&
         _PyType_Lookup(type, kCallImpl) == pytorch().module_call_impl.ptr();
}

// The module's `forward`, if a call of the module would do nothing else than call it; or null.
py::object plain_forward(PyObject* module) {
  static PyObject* const kForward = name("forward");
  static PyObject* const kCallImpl = name("_call_impl");
  if (!is_called_as_usual(Py_TYPE(module)) || !has_no_global_hooks()) return {};
  const py::object dict = steal(PyObject_GenericGetDict(module, nullptr));
  if (!dict || !has_no_hooks(dict) || get(dict, kCallImpl) != nullptr) return {};
  return steal(PyObject_GetAttr(module, kForward));
}

// Arguments as vectorcall has them. Throws error_already_set for some errors, returns null for
// others.
PyObject* call_compiled(PyObject* compiled, PyObject* const* args, Py_ssize_t count,
                        PyObject* names) {
  const bool usual = is_usual(compiled) && count_generation();
  PyErr_Clear();  // what could not be read is not usual
  if (!usual) return PyObject_Vectorcall(part(compiled, kWrapper), args, count, names);
  PyObject* module = part(compiled, kModule);
  const py::object forward = module == Py_None ? py::object() : plain_forward(module);
  PyErr_Clear();
  PyObject* function = forward ? forward.ptr() : part(compiled, kFunction);
  PyObject* result = nullptr;
  {
    const Installed installed(compiled);
    result = PyObject_Vectorcall(function, args, count, names);
  }
  if (result == nullptr && PyErr_ExceptionMatches(pytorch().shown_otherwise.ptr()) != 0) {
    const py::error_already_set error;
    py::reinterpret_borrow<py::object>(part(compiled, kRaiseToUser))(error.value());
  }
  return result;
}

template <typename Call>
PyObject* returning_errors(const Call& call) {
  try {
    return call();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* compiled_call(PyObject* compiled, PyObject* const* args, Py_ssize_t count,
                        PyObject* names) {
  return returning_errors([&] { return call_compiled(compiled, args, count, names); });
}

PyCFunction as_method(_PyCFunctionFastWithKeywords function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef g_compiled_call = {"compiled_call", as_method(&compiled_call),
                               METH_FASTCALL | METH_KEYWORDS, "A call of a compiled function."};

// Of a module's `forward`, borrowed: what make_compiled_call() keeps; or null.
PyObject* compiled_forward(const py::handle& module_dict) {
  static PyObject* const kForward = name("forward");
  static PyObject* const kAttribute = name(kCompiledCall);
  PyObject* forward = get(module_dict, kForward);
  if (forward == nullptr || !PyFunction_Check(forward)) return nullptr;
  PyObject* attributes = reinterpret_cast<PyFunctionObject*>(forward)->func_dict;
  PyObject* function = attributes == nullptr ? nullptr : get(attributes, kAttribute);
  const bool is_ours = function != nullptr && PyCFunction_Check(function) &&
                       PyCFunction_GET_FUNCTION(function) == g_compiled_call.ml_meth;
  return is_ours ? PyCFunction_GET_SELF(function) : nullptr;
}

// Sets the flag by which PyTorch knows that a compiled module is being called.
class InOptimizedModule {
 public:
  InOptimizedModule() : before_(py::reinterpret_borrow<py::object>(get(pytorch().dynamo, flag()))) {
    PyDict_SetItem(pytorch().dynamo.ptr(), flag(), Py_True);
  }
  ~InOptimizedModule() {
    const py::error_scope error;
    PyDict_SetItem(pytorch().dynamo.ptr(), flag(), before_.ptr());
  }
  InOptimizedModule(const InOptimizedModule&) = delete;
  InOptimizedModule& operator=(const InOptimizedModule&) = delete;

 private:
  static PyObject* flag() {
    static PyObject* const kFlag = name("_in_optimized_module");
    return kFlag;
  }
  py::object before_;
};

// The method's own: what it was made for.
PyTypeObject* g_type = nullptr;
PyObject* g_original = nullptr;

PyObject* call_original(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  const Py_ssize_t total = count + (names == nullptr ? 0 : PyTuple_GET_SIZE(names));
  std::vector<PyObject*> all{self};
  all.insert(all.end(), args, args + total);
  return PyObject_Vectorcall(g_original, all.data(), count + 1, names);
}

PyObject* module_call(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  return returning_errors([&] {
    const py::object dict = steal(PyObject_GenericGetDict(self, nullptr));
    PyObject* compiled = dict ? compiled_forward(dict) : nullptr;
    const auto* module_type = reinterpret_cast<PyTypeObject*>(pytorch().module_type.ptr());
    const bool usual = compiled != nullptr && Py_TYPE(self) == g_type && has_no_hooks(dict) &&
                       has_no_global_hooks() &&
                       is_called_as_usual(const_cast<PyTypeObject*>(module_type)) &&
                       !torch::jit::tracer::isTracing();
    PyErr_Clear();
    if (!usual) return call_original(self, args, count, names);
    const InOptimizedModule flag;
    const auto kept = py::reinterpret_borrow<py::object>(compiled);  // `forward` may be replaced
    return call_compiled(compiled, args, count, names);
  });
}

PyMethodDef g_module_call = {"__call__", as_method(&module_call), METH_FASTCALL | METH_KEYWORDS,
                             "__call__($self, /, *args, **kwargs)\n--\n\nCalls the module."};

}  // namespace

PyObject* make_compiled_call(const CompiledFunction& compiled) {
  return returning_errors([&]() -> PyObject* {
    pytorch();  // all of it is there
    const py::object parts = steal(
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

}  // namespace pygraph
