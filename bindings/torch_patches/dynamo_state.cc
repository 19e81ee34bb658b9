#include "torch_patches/dynamo_state.h"

#include <torch/csrc/jit/frontend/tracer.h>

namespace py = pybind11;

namespace pygraph::bindings {
namespace {

py::object attribute_of(const char* module, const char* name) {
  return py::module_::import(module).attr(name);
}

py::dict globals_of(const char* module) {
  return attribute_of(module, "__dict__");
}

DynamoState read_state() {
  constexpr const char* kEvalFrame = "torch._C._dynamo.eval_frame";
  constexpr const char* kFunctorch = "torch._C._functorch";
  constexpr const char* kErrors = "torch._dynamo.exc";
  const py::object module_type = attribute_of("torch.nn", "Module");
  return {
      .dynamo = globals_of("torch._dynamo.eval_frame"),
      .modules = globals_of("torch.nn.modules.module"),
      .compiler = globals_of("torch.compiler"),
      .fx = globals_of("torch.fx._symbolic_trace"),
      .guards_tls = attribute_of("torch._guards", "_TLS"),
      .generations = attribute_of("torch._dynamo.mutation_guard", "GenerationTracker"),
      .set_eval_frame = attribute_of(kEvalFrame, "set_eval_frame"),
      .set_skips_guards = attribute_of(kEvalFrame, "set_skip_guard_eval_unsafe"),
      .set_override = attribute_of(kEvalFrame, "set_eval_frame_override"),
      .wanted_override = attribute_of("torch._dynamo.eval_frame", "_get_eval_frame_override"),
      .functorch_depth = attribute_of(kFunctorch, "get_dynamic_layer_stack_depth"),
      .pop_functorch_to = attribute_of(kFunctorch, "pop_dynamic_layer_stack_and_undo_to_depth"),
      .rewritten_exceptions = py::make_tuple(attribute_of(kErrors, "Unsupported"),
                                             attribute_of(kErrors, "UncapturedHigherOrderOpError"),
                                             attribute_of(kErrors, "ShortenTraceback")),
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
  PyObject* fx_tracing = intern("_is_fx_tracing_flag");
  PyObject* dict = intern("__dict__");
  PyObject* tracing = intern("tracing_context");
  PyObject* needs_patch = intern("___needs_generation_tag_patch");
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

py::object call(const py::object& function, PyObject* argument) {
  py::object result = steal_object(PyObject_CallOneArg(function.ptr(), argument));
  if (!result) throw py::error_already_set();
  return result;
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
      get(state.fx, names().fx_tracing) != Py_False ||
      !is_default(get(state.dynamo, names().stance_of_process))) {
    return false;
  }
  const py::object guards_tls = attribute(state.guards_tls, names().dict);
  PyObject* context = guards_tls ? get(guards_tls, names().tracing) : Py_True;
  return context == nullptr || context == Py_None;
}

bool count_generation() {
  static PyObject* const one = PyLong_FromLong(1);
  static bool is_patched = false;
  const DynamoState& state = dynamo_state();
  if (!is_patched) {
    is_patched = attribute(state.module_type, names().needs_patch).is(py::handle(Py_False));
    if (!is_patched) return false;
  }
  PyObject* tracker = state.generations.ptr();
  const py::object now = attribute(tracker, names().generation);
  const py::object next = steal_object(now ? PyNumber_Add(now.ptr(), one) : nullptr);
  return next && PyObject_SetAttr(tracker, names().generation, next.ptr()) == 0;
}

InstalledCallback::InstalledCallback(PyObject* callback, bool full_graph)
    : before_(call(dynamo_state().set_eval_frame, Py_None)),
      layers_(dynamo_state().functorch_depth()) {
  const DynamoState& state = dynamo_state();
  if (full_graph) override_before_ = call(state.set_override, state.wanted_override().ptr());
  skipped_before_ = call(state.set_skips_guards, Py_False);
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
