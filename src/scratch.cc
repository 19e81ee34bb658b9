#include "scratch.h"

#include <map>

namespace pygraph {
namespace {

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
    const Symbol& symbol = linked.symbols[i];
    const bool is_scratch = symbol.kind == SymbolKind::kInternal &&
                            linked.recording.is_scratch(symbol.address_b, symbol.last);
    if (is_scratch) split(linked, i);
  }
}

}  // namespace pygraph
