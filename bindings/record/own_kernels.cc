#include "record/own_kernels.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <array>
#include <sstream>
#include <string>
#include <string_view>

namespace pygraph::bindings {
namespace {

// Through which a call with plain tensors on a GPU may go.
constexpr std::array<std::string_view, 9> kKeys = {
    "CUDA",          "AutogradCUDA", "AutocastCUDA", "ADInplaceOrView", "BackendSelect",
    "Functionalize", "Conjugate",    "Negative",     "ZeroTensor"};
// Where PyTorch's kernels are registered. Those of others have a path of theirs, or "<string>".
constexpr std::array<std::string_view, 2> kSources = {"aten/src/ATen/", "torch/csrc/autograd/"};

bool is_own(std::string_view line) {
  return std::ranges::any_of(kSources, [&](auto source) { return line.find(source) != line.npos; });
}

}  // namespace

bool has_own_kernels(const c10::OperatorName& name) {
  const auto op = c10::Dispatcher::singleton().findOp(name);
  if (!op.has_value()) return false;
  // One line per key: "CUDA: registered at .../aten/src/ATen/RegisterCUDA_0.cpp:38170 [kernel]".
  std::istringstream table(op->dumpComputedTable());
  size_t found = 0;
  for (std::string line; std::getline(table, line);) {
    const std::string_view key = std::string_view(line).substr(0, line.find(':'));
    if (std::ranges::find(kKeys, key) == kKeys.end()) continue;
    if (!is_own(line)) return false;
    ++found;
  }
  return found == kKeys.size();
}

}  // namespace pygraph::bindings
