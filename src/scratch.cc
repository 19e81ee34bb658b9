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
  std::map<uint32_t, uint32_t> parts;  // symbols, by operator
  bool is_still_used = false;
  for (Relocation& relocation : linked.relocations) {
    if (relocation.symbol != index) continue;
    const Node& node = linked.recording.nodes[relocation.node];
    if (node.op == Node::kNoOperator) {
      is_still_used = true;
      continue;
    }
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
  if (!is_still_used) linked.symbols[index].size = 0;
}

}  // namespace

void split_scratch(LinkedGraph& linked) {
  const auto count = static_cast<uint32_t>(linked.symbols.size());
  for (uint32_t i = 0; i < count; ++i) {
    if (is_scratch(linked.recording, linked.symbols[i])) split(linked, i);
  }
}

}  // namespace pygraph
