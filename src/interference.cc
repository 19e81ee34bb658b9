#include "interference.h"

#include <algorithm>

namespace pygraph {

Interference::Interference(const LinkedGraph& linked, const ExecutionOrder& order,
                           std::span<const HiddenUse> hidden)
    : symbols_(linked.symbols) {
  if (order.is_chain) return;
  const size_t count = order.step_begin.size();
  NodeSet all(count);
  for (uint32_t p = 0; p < count; ++p) all.insert(p);
  uses_.assign(symbols_.size(), {.users = NodeSet(count), .ended = all});
  const auto use = [&](uint32_t symbol, uint32_t position) {
    uses_[symbol].users.insert(position);
    uses_[symbol].first_user = std::min(uses_[symbol].first_user, position);
    uses_[symbol].last_user = std::max(uses_[symbol].last_user, position);
    uses_[symbol].ended.keep_only(order.ended[position]);
  };
  for (const Relocation& relocation : linked.relocations) {
    const Node& node = linked.recording.nodes[relocation.node];
    if (node.may_access(relocation.offset)) use(relocation.symbol, node.position);
  }
  // Addresses that an operator's kernels leave in memory are used by its other kernels only.
  for (const Relocation& relocation : linked.relocations) {
    const Node& node = linked.recording.nodes[relocation.node];
    const Operator* op = operator_with_tables(linked.recording, node);
    if (op == nullptr) continue;
    for (uint32_t p = op->first; p < std::min<size_t>(op->last, count); ++p) {
      const Symbol& symbol = symbols_[relocation.symbol];
      if (symbol.first <= p && p < symbol.last) use(relocation.symbol, p);
    }
  }
  for (const Node& node : linked.recording.nodes) {
    if (!may_take_addresses(linked.recording, node)) continue;
    for (uint32_t s = 0; s < symbols_.size(); ++s) {
      const bool is_alive = symbols_[s].first <= node.position && node.position < symbols_[s].last;
      const bool is_known = hidden[s].begin <= node.position && node.position < hidden[s].end;
      if (is_alive && is_known) use(s, node.position);
    }
  }
}

bool Interference::conflict(uint32_t a, uint32_t b) const {
  if (uses_.empty()) {
    return symbols_[a].first < symbols_[b].last && symbols_[b].first < symbols_[a].last;
  }
  return !uses_[b].are_all_in(uses_[a].ended) && !uses_[a].are_all_in(uses_[b].ended);
}

}  // namespace pygraph
