#include "record/operator_schema.h"

#include <algorithm>
#include <array>

namespace pygraph::bindings {
namespace {

// Arguments of PyTorch's operators that are written although their schemas do not say so: the
// statistics of batch normalisations, and what cuDNN's recurrent networks keep for their backward.
constexpr std::array<std::string_view, 7> kUnmarked = {
    "running_mean", "running_var",   "reserve",      "reserveSpace",
    "weight_buf",   "dropout_state", "reservedSpace"};

bool is_marked(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

}  // namespace

bool is_own(std::string_view name) {
  constexpr std::array<std::string_view, 3> kNamespaces = {
      "aten::", "prims::", "_c10d_functional::"};
  // Runs the operators of a whole backward in other threads.
  if (name == "aten::_backward") return false;
  return std::ranges::any_of(kNamespaces, [&](auto prefix) { return name.starts_with(prefix); });
}

bool is_custom(const at::RecordFunction& function) {
  const std::string_view name = function.name();
  return function.operator_name().has_value() && !is_own(name) && !name.starts_with("aten::");
}

bool is_operator(const at::RecordFunction& function) {
  const std::string_view name = function.name();
  // Autograd's kernels of aten::detach and aten::detach_ report themselves under these names; a
  // custom function of that name would have a sequence number.
  if ((name == "detach" || name == "detach_") && function.seqNr() < 0) return false;
  return !name.starts_with("autograd::engine::evaluate_function");
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.has_storage() && !tensor.key_set().has(c10::DispatchKey::Python);
}

bool may_write(const c10::FunctionSchema& schema, const c10::Argument& argument) {
  if (is_marked(argument)) return true;
  if (std::ranges::find(kUnmarked, argument.name()) != kUnmarked.end()) return true;
  // In-place by its name, and nothing marked.
  return schema.name().ends_with('_') && std::ranges::none_of(schema.arguments(), is_marked);
}

}  // namespace pygraph::bindings
