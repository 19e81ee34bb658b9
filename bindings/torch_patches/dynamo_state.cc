#include "torch_patches/dynamo_state.h"

#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/headeronly/version.h>

#include "conversions.h"

namespace py = pybind11;

namespace pygraph::bindings {
namespace {

py::object attribute_of(const char* module, const char* name) {
  return py::module_::import(module).attr(name);
}

py::dict globals_of(const char* module) {
  return attribute_of(module, "__dict__");
}

constexpr bool since(int minor) {
  return TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= minor;
}

// What only some releases have; nothing in the others.
py::object attribute_if(bool is_there, const char* module, const char* name) {
  return is_there ? attribute_of(module, name) : py::object();
}

py::tuple rewritten_exceptions() {
  const py::module_ errors = py::module_::import("torch._dynamo.exc");
  py::list found;
  for (const char* name : {"Unsupported", "UncapturedHigherOrderOpError", "ShortenTraceback"}) {
    found.append(errors.attr(name));
  }
  if (since(12)) found.append(errors.attr("UserError"));  // before, one of Unsupported
  return py::tuple(found);
}

DynamoState read_state() {
  constexpr const char* kDynamo = "torch._dynamo.eval_frame";
  constexpr const char* kFx = "torch.fx._symbolic_trace";
  constexpr const char* kEvalFrame = "torch._C._dynamo.eval_frame";
  constexpr const char* kFunctorch = "torch._C._functorch";
  const py::object module_type = attribute_of("torch.nn", "Module");
  return {
      .dynamo = globals_of(kDynamo),
      .modules = globals_of("torch.nn.modules.module"),
      .compiler = globals_of("torch.compiler"),
      .fx = globals_of(kFx),
      .fx_tls = attribute_if(since(14), kFx, "_is_fx_tracing_tls"),
      .guards_tls = attribute_of("torch._guards", "_TLS"),
      .nesting_tls = attribute_if(since(14), kDynamo, "_force_eager_nested_compile"),
      .generations = attribute_of("torch._dynamo.mutation_guard", "GenerationTracker"),
      .set_eval_frame = attribute_of(kEvalFrame, "set_eval_frame"),
      .set_skips_guards = attribute_of(kEvalFrame, "set_skip_guard_eval_unsafe"),
      .set_override = attribute_if(!since(12), kEvalFrame, "set_eval_frame_override"),
      .wanted_override = attribute_if(!since(12), kDynamo, "_get_eval_frame_override"),
      .set_isolation = attribute_if(since(13), kEvalFrame, "set_eval_frame_isolate_recompiles_id"),
      .functorch_depth = attribute_of(kFunctorch, "get_dynamic_layer_stack_depth"),
      .pop_functorch_to = attribute_of(kFunctorch, "pop_dynamic_layer_stack_and_undo_to_depth"),
      .rewritten_exceptions = rewritten_exceptions(),
      .module_type = module_type,
      .module_call = module_type.attr("_wrapped_call_impl"),  // `__call__` may be somebody's
      .module_call_impl = module_type.attr("_call_impl"),
  };
}

struct Names {
  PyObject* stance_of_process = intern("_stance");
  PyObject* stance = intern("stance");
  PyObject* skips_guards = intern("skip_guard_eval_unsafe");
  PyObject* backend = intern("backend");
  PyObject* exporting = intern("_is_exporting_flag");
  PyObject* fx_tracing = intern("_is_fx_tracing_flag");  // before PyTorch 2.14
  PyObject* flag = intern("flag");
  PyObject* depth = intern("depth");
  PyObject* dict = intern("__dict__");
  PyObject* tracing = intern("tracing_context");
  PyObject* patched =
      intern(since(15) ? "___has_generation_tag_patch" : "___needs_generation_tag_patch");
  PyObject* generation = intern("generation");
  PyObject* in_module = intern("_in_optimized_module");
};

const Names& names() {
  static const auto* names = new Names;
  return *names;
}

py::object attribute(const py::handle& object, PyObject* name) {
  return steal_object(PyObject_GetAttr(object.ptr(), name));
}

bool is_default(PyObject* stance) {
  if (stance == nullptr) return false;
  const py::object value = attribute(stance, names().stance);
  return value && PyUnicode_CompareWithASCIIString(value.ptr(), "default") == 0 &&
         attribute(stance, names().skips_guards).is(py::handle(Py_False)) &&
         attribute(stance, names().backend).is_none();
}

// A value of this thread; null if it has none, and True if that is not known.
PyObject* of_thread(const py::object& thread_local_values, PyObject* name) {
  const py::object values = attribute(thread_local_values, names().dict);
  return values ? get(values, name) : Py_True;
}

// Whether torch.fx traces in this thread, or in any before PyTorch 2.14.
bool is_fx_tracing() {
  const DynamoState& state = dynamo_state();
  if (!state.fx_tls) return get(state.fx, names().fx_tracing) != Py_False;
  PyObject* flag = of_thread(state.fx_tls, names().flag);
  return flag != nullptr && flag != Py_False;
}

// Whether PyTorch is compiling something else in this thread, and wants this to run as it is.
bool runs_as_it_is() {
  const DynamoState& state = dynamo_state();
  if (!state.nesting_tls) return false;
  PyObject* depth = of_thread(state.nesting_tls, names().depth);
  return depth != nullptr && PyObject_IsTrue(depth) != 0;
}

py::object call(const py::object& function, PyObject* argument) {
  py::object result = steal_object(PyObject_CallOneArg(function.ptr(), argument));
  if (!result) throw py::error_already_set();
  return result;
}

// The number that stands for recompilations that are not isolated.
PyObject* not_isolated() {
  static PyObject* const number = PyLong_FromLong(-1);
  return number;
}

// Where nothing can be done about an error.
void set(const py::object& function, const py::handle& value) {
  Py_XDECREF(PyObject_CallOneArg(function.ptr(), value.ptr()));
}

}  // namespace

const DynamoState& dynamo_state() {
  static const auto* state = new DynamoState(read_state());
  return *state;
}

bool can_take_fast_path() {
  const DynamoState& state = dynamo_state();
  if (torch::jit::tracer::isTracing() || get(state.compiler, names().exporting) != Py_False ||
      is_fx_tracing() || runs_as_it_is() ||
      !is_default(get(state.dynamo, names().stance_of_process))) {
    return false;
  }
  PyObject* context = of_thread(state.guards_tls, names().tracing);
  return context == nullptr || context == Py_None;
}

bool count_generation() {
  static PyObject* const one = PyLong_FromLong(1);
  static bool is_patched = false;
  const DynamoState& state = dynamo_state();
  if (!is_patched) {
    const py::handle expected = since(15) ? Py_True : Py_False;
    is_patched = attribute(state.module_type, names().patched).is(expected);
    if (!is_patched) return false;
  }
  PyObject* tracker = state.generations.ptr();
  const py::object now = attribute(tracker, names().generation);
  const py::object next = steal_object(now ? PyNumber_Add(now.ptr(), one) : nullptr);
  return next && PyObject_SetAttr(tracker, names().generation, next.ptr()) == 0;
}

InstalledCallback::InstalledCallback(PyObject* callback, bool full_graph)
    : before_(call(dynamo_state().set_eval_frame, Py_None)),
      layers_(dynamo_state().functorch_depth()),
      keys_(c10::impl::tls_local_dispatch_key_set()) {
  const DynamoState& state = dynamo_state();
  if (full_graph) override_before_ = call(state.set_override, state.wanted_override().ptr());
  skipped_before_ = call(state.set_skips_guards, Py_False);
  if (state.set_isolation) isolation_before_ = call(state.set_isolation, not_isolated());
  call(state.set_eval_frame, callback);
}

InstalledCallback::~InstalledCallback() {
  const py::error_scope error;
  const DynamoState& state = dynamo_state();
  set(state.set_eval_frame, py::none());
  if (override_before_) set(state.set_override, override_before_);
  const py::object layers = steal_object(PyObject_CallNoArgs(state.functorch_depth.ptr()));
  const bool same = layers && PyObject_RichCompareBool(layers.ptr(), layers_.ptr(), Py_EQ) == 1;
  if (!same) set(state.pop_functorch_to, layers_);
  set(state.set_skips_guards, skipped_before_);
  if (isolation_before_) set(state.set_isolation, isolation_before_);
  if (since(13)) c10::impl::_force_tls_local_dispatch_key_set(keys_);
  set(state.set_eval_frame, before_);
}

InOptimizedModule::InOptimizedModule()
    : before_(py::reinterpret_borrow<py::object>(get(dynamo_state().dynamo, names().in_module))) {
  PyDict_SetItem(dynamo_state().dynamo.ptr(), names().in_module, Py_True);
}

InOptimizedModule::~InOptimizedModule() {
  const py::error_scope error;
  PyDict_SetItem(dynamo_state().dynamo.ptr(), names().in_module, before_.ptr());
}

}  // namespace pygraph::bindings
