#include "chain.h"

#include <algorithm>

namespace pygraph {
namespace {

// The kernel at the end of the edge may start when all blocks of the other have allowed it or
// ended.
constexpr abi::EdgeData kProgrammatic{.from_port = 1, .to_port = 0, .type = 1, .reserved = {}};

}  // namespace

uint32_t Chain::begin_of(uint32_t first) const {
  return first < step_begin.size() ? step_begin[first] : first;
}

uint32_t Chain::end_of(uint32_t last) const {
  return last > 0 && last <= step_end.size() ? step_end[last - 1] : last;
}

std::optional<Chain> find_chain(const Recording& recording) {
  std::vector<uint32_t> nodes;
  for (uint32_t n = 0; n < recording.nodes.size(); ++n) {
    if (recording.nodes[n].parent < 0) nodes.push_back(n);
  }
  const auto count = static_cast<uint32_t>(nodes.size());
  Chain chain{std::vector<uint32_t>(count), std::vector<uint32_t>(count)};
  uint32_t next = 1;
  for (const Edge& edge : recording.edges) {
    if (recording.nodes[edge.from].parent >= 0) continue;
    if (next >= count || edge.from != nodes[next - 1] || edge.to != nodes[next]) return {};
    if (edge.data != abi::EdgeData{} && edge.data != kProgrammatic) return {};
    chain.step_begin[next] = edge.data == kProgrammatic ? chain.step_begin[next - 1] : next;
    ++next;
  }
  if (next < count) return {};
  for (uint32_t n = count; n-- > 0;) {
    const bool is_last = n + 1 == count || chain.step_begin[n + 1] == n + 1;
    chain.step_end[n] = is_last ? n + 1 : chain.step_end[n + 1];
  }
  return chain;
}

}  // namespace pygraph
