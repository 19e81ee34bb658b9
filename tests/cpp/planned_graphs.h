// Graphs made by hand for the tests of memory planning; nothing here needs a device.
#pragma once

#include <algorithm>
#include <random>

#include "order.h"
#include "pygraph/link.h"

namespace pygraph::testing {

inline LinkedGraph chain(uint32_t nodes) {
  LinkedGraph linked;
  linked.recording.nodes.resize(nodes);
  for (uint32_t n = 0; n + 1 < nodes; ++n) linked.recording.edges.push_back({n, n + 1, {}});
  return linked;
}

inline void add_internal(LinkedGraph& linked, uint64_t size, uint32_t first, uint32_t last,
                         uint64_t address = 0) {
  Symbol symbol{SymbolKind::kInternal, 0, size, first, last};
  symbol.address_b = address;
  linked.symbols.push_back(symbol);
}

inline bool overlap(const Symbol& a, const Symbol& b) {
  return a.workspace_offset < b.workspace_offset + b.size &&
         b.workspace_offset < a.workspace_offset + a.size;
}

constexpr uint64_t kMiB = uint64_t{1} << 20;

struct Use {
  uint32_t first = Allocation::kNever;
  uint32_t end = 0;
};

inline Use use_of(const LinkedGraph& linked, SymbolKind kind, uint32_t slot) {
  Use use;
  for (const Relocation& relocation : linked.relocations) {
    const Symbol& symbol = linked.symbols[relocation.symbol];
    if (symbol.kind != kind || symbol.slot != slot) continue;
    use.first = std::min(use.first, relocation.node);
    use.end = std::max(use.end, relocation.node + 1);
  }
  return use;
}

// A chain with inputs, outputs and internal memory used at random nodes.
inline LinkedGraph random_chain(std::mt19937& random) {
  constexpr uint32_t kNodes = 40;
  LinkedGraph linked = chain(kNodes);
  for (uint32_t n = 0; n < kNodes; ++n) linked.recording.nodes[n].position = n;
  linked.recording.inputs.resize(10);
  linked.recording.outputs.resize(10);
  const auto use = [&](uint32_t node) {
    linked.relocations.push_back({node, 0, static_cast<uint32_t>(linked.symbols.size() - 1), 0});
  };
  for (uint32_t slot = 0; slot < 10; ++slot) {
    linked.symbols.push_back({SymbolKind::kInput, slot, (1 + random() % 8) * kMiB});
    for (int i = 0; i < 3; ++i) use(random() % kNodes);
    linked.symbols.push_back({SymbolKind::kOutput, slot, 1 + random() % (8 * kMiB)});
    for (int i = 0; i < 2; ++i) use(random() % kNodes);
  }
  for (int i = 0; i < 30; ++i) {
    const uint32_t first = random() % kNodes;
    add_internal(linked, 1 + random() % (4 * kMiB), first, first + 1 + random() % 5);
  }
  return linked;
}

// Input 0 is used by node 0, output 0 by node 1, and internal memory by each of them.
inline LinkedGraph one_after_the_other(const abi::EdgeData& edge) {
  LinkedGraph linked = chain(2);
  linked.recording.nodes[1].position = 1;
  linked.recording.edges[0].data = edge;
  linked.recording.inputs.resize(1);
  linked.recording.outputs.resize(1);
  linked.symbols.push_back({SymbolKind::kInput, 0, 4 * kMiB});
  linked.symbols.push_back({SymbolKind::kOutput, 0, 4 * kMiB});
  linked.relocations = {{.node = 0, .symbol = 0}, {.node = 1, .symbol = 1}};
  add_internal(linked, 3 * kMiB, 0, 1);
  add_internal(linked, 2 * kMiB, 1, 2);
  return linked;
}

}  // namespace pygraph::testing
