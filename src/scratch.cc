#include "scratch.h"

#include <algorithm>
#include <map>

namespace pygraph {
namespace {

bool is_scratch(const Recording& recording, const Symbol& symbol) {
  return symbol.kind == SymbolKind::kInternal &&
         std::ranges::find(recording.scratch, symbol.address_b) != recording.scratch.end();
}

void split(LinkedGraph& linked, uint32_t index) {
  const auto node_of = [&](const Relocation& relocation) -> const Node& {
    return linked.recording.nodes[relocation.node];
  };
  const auto is_outside = [&](const Relocation& relocation) {
    return relocation.symbol == index && node_of(relocation).op == Node::kNoOperator;
  };
  if (std::ranges::any_of(linked.relocations, is_outside)) return;
  std::map<uint32_t, uint32_t> parts;  // symbols, by operator
  for (Relocation& relocation : linked.relocations) {
    if (relocation.symbol != index) continue;
    const Node& node = node_of(relocation);
    const auto [part, is_new] =
        parts.try_emplace(node.op, static_cast<uint32_t>(linked.symbols.size()));
    if (is_new) {
      Symbol symbol = linked.symbols[index];
      symbol.first = node.position;
      linked.symbols.push_back(symbol);
    }
    linked.symbols[part->second].last = node.position + 1;
    relocation.symbol = part->second;
  }
  linked.symbols[index].size = 0;  // nobody uses it any more
  linked.symbols[index].last = linked.symbols[index].first;
}

}  // namespace

void split_scratch(LinkedGraph& linked) {
  const auto count = static_cast<uint32_t>(linked.symbols.size());
  for (uint32_t i = 0; i < count; ++i) {
    if (is_scratch(linked.recording, linked.symbols[i])) split(linked, i);
  }
}

}  // namespace pygraph
