#include "order.h"

namespace pygraph {

std::optional<ExecutionOrder> order_of_chain(const Recording& recording) {
  std::vector<uint32_t> nodes;
  for (uint32_t n = 0; n < recording.nodes.size(); ++n) {
    if (recording.nodes[n].parent < 0) nodes.push_back(n);
  }
  const auto count = static_cast<uint32_t>(nodes.size());
  ExecutionOrder order{std::vector<uint32_t>(count)};
  uint32_t next = 1;
  for (const Edge& edge : recording.edges) {
    if (recording.nodes[edge.from].parent >= 0) continue;
    if (next >= count || edge.from != nodes[next - 1] || edge.to != nodes[next]) return {};
    if (edge.data != abi::EdgeData{} && edge.data != kProgrammatic) return {};
    order.step_begin[next] = edge.data == kProgrammatic ? order.step_begin[next - 1] : next;
    ++next;
  }
  if (next < count) return {};
  return order;
}

}  // namespace pygraph
