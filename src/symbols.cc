#include "symbols.h"

#include <algorithm>
#include <string>

namespace pygraph {

static bool is_match(Match rule, const Symbol& symbol, uint32_t position, uint64_t distance) {
  const bool alive = symbol.first <= position && position < symbol.last;
  switch (rule) {
    case Match::kAlive:
      return alive && distance < symbol.size;
    case Match::kJustFreed:
      return symbol.last == position && distance < symbol.size;
    case Match::kEndOfAlive:
      return alive && distance == symbol.size;
    case Match::kFreed:
      return symbol.last <= position && distance < symbol.size;
  }
  return false;
}

std::optional<Resolved> resolve(const std::vector<Symbol>& symbols, uint32_t position,
                                uint64_t word_a, uint64_t word_b, Match rule) {
  for (size_t i = symbols.size(); i-- > 0;) {
    const Symbol& symbol = symbols[i];
    const uint64_t distance = word_a - symbol.address_a;
    if (distance == word_b - symbol.address_b && is_match(rule, symbol, position, distance)) {
      return Resolved{static_cast<uint32_t>(i), distance};
    }
  }
  return std::nullopt;
}

std::vector<Symbol> collect_symbols(const Recording& a, const Recording& b) {
  std::vector<Symbol> symbols;
  for (uint32_t slot = 0; slot < a.inputs.size(); ++slot) {
    symbols.push_back({SymbolKind::kInput, slot, a.inputs[slot].size, 0, Allocation::kNever,
                       a.inputs[slot].address, b.inputs[slot].address});
  }
  const size_t first_allocation = symbols.size();
  for (size_t i = 0; i < a.allocations.size(); ++i) {
    const Allocation& x = a.allocations[i];
    symbols.push_back(
        {SymbolKind::kInternal, 0, x.size, x.first, x.last, x.address, b.allocations[i].address});
  }
  for (uint32_t slot = 0; slot < a.outputs.size(); ++slot) {
    const auto is_backing = [&](const Symbol& s) {
      return s.last == Allocation::kNever && a.outputs[slot] - s.address_a < s.size &&
             a.outputs[slot] - s.address_a == b.outputs[slot] - s.address_b;
    };
    const auto it = std::find_if(symbols.begin() + static_cast<ptrdiff_t>(first_allocation),
                                 symbols.end(), is_backing);
    if (it == symbols.end()) {
      throw NotRelocatable("output " + std::to_string(slot) + " is not memory of this recording");
    }
    if (it->kind == SymbolKind::kOutput) {
      throw NotRelocatable("outputs " + std::to_string(it->slot) + " and " + std::to_string(slot) +
                           " lie in one allocation");
    }
    it->kind = SymbolKind::kOutput;
    it->slot = slot;
  }
  for (uint32_t i = 0; i < b.random.size(); ++i) {
    symbols.push_back({SymbolKind::kRandom, i, kRandomStateSize});
  }
  return symbols;
}

std::optional<uint32_t> find_random_state(const Recording& a, const Recording& b,
                                          const Node& node_a, const Node& node_b, uint32_t offset) {
  if (node_b.kind != NodeKind::kKernel || offset + kRandomStateSize > node_b.image.size())
    return {};
  const auto are_at = [offset](const Node& node, const RandomState& state) {
    return node.word_at(offset) == state.seed_address &&
           node.word_at(offset + sizeof state.seed_address) == state.offset_address;
  };
  for (uint32_t i = 0; i < b.random.size(); ++i) {
    if (are_at(node_a, a.random[i]) && are_at(node_b, b.random[i])) return i;
  }
  return {};
}

}  // namespace pygraph
