#include "interference.h"

#include <algorithm>

namespace pygraph {

Interference::Interference(const LinkedGraph& linked, const ExecutionOrder& order)
    : symbols_(linked.symbols) {
  if (order.is_chain) return;
  const size_t count = order.step_begin.size();
  NodeSet all(count);
  for (uint32_t p = 0; p < count; ++p) all.insert(p);
  uses_.assign(symbols_.size(), {NodeSet(count), all});
  const auto use = [&](uint32_t symbol, uint32_t position) {
    uses_[symbol].users.insert(position);
    uses_[symbol].ended.keep_only(order.ended[position]);
  };
  for (const Relocation& relocation : linked.relocations) {
    const Node& node = linked.recording.nodes[relocation.node];
    if (node.may_access(relocation.offset)) use(relocation.symbol, node.position);
  }
  for (const Node& node : linked.recording.nodes) {
    if (node.parent >= 0 || node.has_known_accesses) continue;
    for (uint32_t s = 0; s < symbols_.size(); ++s) {
      const bool is_alive = symbols_[s].first <= node.position && node.position < symbols_[s].last;
      if (is_alive) use(s, node.position);
    }
  }
}

bool Interference::conflict(uint32_t a, uint32_t b) const {
  if (uses_.empty()) {
    return symbols_[a].first < symbols_[b].last && symbols_[b].first < symbols_[a].last;
  }
  return !uses_[a].ended.contains(uses_[b].users) && !uses_[b].ended.contains(uses_[a].users);
}

}  // namespace pygraph
