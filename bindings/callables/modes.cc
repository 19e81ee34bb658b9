#include "callables/modes.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/TracerMode.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/forward_grad.h>

#include <utility>
#include <vector>

namespace pygraph::bindings {
namespace {

Modes::Autocast autocast_of(c10::DeviceType device) {
  return {at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)};
}

}  // namespace

Modes current_modes() {
  return {c10::GradMode::is_enabled(),
          c10::InferenceMode::is_enabled(),
          at::autocast::is_autocast_cache_enabled(),
          c10::typeMetaToScalarType(c10::get_default_dtype()),
          {autocast_of(c10::kCUDA), autocast_of(c10::kCPU)},
          at::detail::getDefaultCPUGenerator().current_seed(),
          current_switches()};
}

std::string Modes::text() const {
  std::string text;
  const auto add = [&](auto value) {
    text += std::to_string(static_cast<uint64_t>(value));
    text += ' ';
  };
  add(grad);
  add(inference);
  add(autocast_cache);
  add(default_dtype);
  for (const auto& [is_enabled, dtype] : autocast) {
    add(is_enabled);
    add(dtype);
  }
  add(seed);
  add(switches.flags);
  add(switches.numbers);
  return text;
}

bool are_operators_watched() {
  const auto& saved = at::SavedTensorDefaultHooks::get_tls_state();
  return !saved.stack.empty() || saved.disabled_error_message.has_value() ||
         at::tracer::impl::is_dispatch_enabled() ||
         torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr ||
         torch::autograd::AnomalyMode::is_enabled() ||
         c10::impl::TorchDispatchModeTLS::stack_len() > 0 ||
         at::impl::PythonTorchFunctionTLS::stack_len() > 0;
}

bool remove_saved_tensors_hooks(pybind11::handle pack, bool with_others) {
  using Hooks = at::SavedTensorDefaultHooks;
  at::impl::SavedTensorDefaultHooksTLS state = Hooks::get_tls_state();
  std::vector<std::pair<c10::SafePyObject, c10::SafePyObject>> above;
  while (!state.stack.empty() && state.stack.top().first.ptr(getPyInterpreter()) != pack.ptr()) {
    above.push_back(state.stack.top());
    state.stack.pop();
  }
  if (state.stack.empty()) return false;
  state.stack.pop();
  const bool has_others = !above.empty();
  for (; !with_others && !above.empty(); above.pop_back()) state.stack.push(above.back());
  Hooks::set_tls_state(state);
  return has_others;
}

}  // namespace pygraph::bindings
