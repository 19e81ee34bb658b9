#include "instantiate.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace pygraph {
namespace {

// Three cost as much as a launch of the second form.
constexpr auto kFewestFills = 4;

// Kernels run with the priority of the stream that the graph is launched on, unless asked to keep
// those that they were captured with. A program that gives some of its streams another priority
// than the default one (0) has a reason.
bool has_priorities(const Driver& driver, const Recording& recording) {
  return std::ranges::any_of(recording.nodes, [&](const Node& node) {
    if (node.kind != NodeKind::kKernel) return false;
    abi::LaunchAttributeValue value{};
    PYGRAPH_CHECK(driver,
                  graph_kernel_get_attribute(node.handle, abi::kLaunchAttributePriority, &value));
    return value.priority != 0;
  });
}

}  // namespace

bool gains_from_device_launch(const Recording& recording) {
  const char* wanted = std::getenv("PYGRAPH_DEVICE_LAUNCH");
  if (wanted != nullptr && std::string_view(wanted) == "0") return false;
  const auto is_fill = [](const Node& node) { return node.kind == NodeKind::kMemset; };
  return std::ranges::count_if(recording.nodes, is_fill) >= kFewestFills;
}

GraphExec instantiate(const Driver& driver, CUgraph graph, const Recording& recording,
                      bool for_device_launch) {
  abi::InstantiateParams params{};
  if (has_priorities(driver, recording)) params.flags |= abi::kInstantiateUseNodePriority;
  if (for_device_launch) params.flags |= abi::kInstantiateDeviceLaunch;
  CUgraphExec raw = nullptr;
  const RelaxedCaptureMode relaxed(driver);  // the driver may allocate
  PYGRAPH_CHECK(driver, graph_instantiate(&raw, graph, &params));
  return {driver, raw};
}

}  // namespace pygraph
