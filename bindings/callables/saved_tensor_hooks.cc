#include "callables/saved_tensor_hooks.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/PyInterpreter.h>

#include <utility>
#include <vector>

namespace pygraph::bindings {

bool remove_saved_tensors_hooks(PyObject* pack, bool with_others) {
  using Hooks = at::SavedTensorDefaultHooks;
  at::impl::SavedTensorDefaultHooksTLS state = Hooks::get_tls_state();
  std::vector<std::pair<c10::SafePyObject, c10::SafePyObject>> above;
  while (!state.stack.empty() && state.stack.top().first.ptr(getPyInterpreter()) != pack) {
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
