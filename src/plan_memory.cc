// Where internal memory lives in the workspace.
//
// A graph that is one chain of nodes (every stream capture of a single stream) executes in the
// order of creation, so two allocations whose lifetimes do not overlap may share bytes: a greedy
// packing, largest first, each at the lowest offset that is free for its whole lifetime.
//
//      size |  [  A  ]            A and B share, C lies above both
//           |         [ B ]
//           |     [    C    ]
//           +------------------> nodes
//
// A graph with branches, or with edges that let a kernel start before its predecessor ends
// (programmatic dependent launch), promises less. There the allocator's own decisions are kept:
// addresses that were shared while recording stay shared, as they are safe by stream order.
#include <algorithm>
#include <numeric>

#include "pygraph/link.h"

namespace pygraph {
namespace {

constexpr uint64_t kAlignment = 512;  // as PyTorch's allocator: kernels may rely on it

uint64_t align_up(uint64_t value) {
  return (value + kAlignment - 1) / kAlignment * kAlignment;
}

bool is_chain(const Recording& recording) {
  uint32_t previous = 0;
  uint32_t seen = 0;
  size_t edge = 0;
  size_t inner_edges = 0;
  for (const Edge& e : recording.edges) inner_edges += recording.nodes[e.from].parent >= 0 ? 1 : 0;
  for (uint32_t n = 0; n < recording.nodes.size(); ++n) {
    if (recording.nodes[n].parent >= 0) continue;
    if (seen++ > 0) {
      while (edge < recording.edges.size() &&
             recording.nodes[recording.edges[edge].from].parent >= 0) {
        ++edge;
      }
      if (edge >= recording.edges.size()) return false;
      const Edge& e = recording.edges[edge++];
      if (e.from != previous || e.to != n || e.data != abi::EdgeData{}) return false;
    }
    previous = n;
  }
  return recording.edges.size() - inner_edges + 1 == seen || seen == 0;
}

std::vector<uint32_t> internal_symbols(const LinkedGraph& linked) {
  std::vector<uint32_t> internals;
  for (uint32_t i = 0; i < linked.symbols.size(); ++i) {
    if (linked.symbols[i].kind == SymbolKind::kInternal) internals.push_back(i);
  }
  return internals;
}

uint64_t pack_by_lifetime(std::vector<Symbol>& symbols, std::vector<uint32_t> order) {
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return symbols[a].size > symbols[b].size; });
  uint64_t total = 0;
  std::vector<uint32_t> placed;  // sorted by workspace offset
  for (const uint32_t index : order) {
    Symbol& symbol = symbols[index];
    uint64_t offset = 0;
    for (const uint32_t other : placed) {
      const Symbol& neighbour = symbols[other];
      const bool together = symbol.first < neighbour.last && neighbour.first < symbol.last;
      if (!together) continue;
      if (offset + symbol.size <= neighbour.workspace_offset) break;  // the gap below fits
      offset = std::max(offset, align_up(neighbour.workspace_offset + neighbour.size));
    }
    symbol.workspace_offset = offset;
    total = std::max(total, align_up(offset + symbol.size));
    const auto by_offset = [&](uint32_t a, uint32_t b) {
      return symbols[a].workspace_offset < symbols[b].workspace_offset;
    };
    placed.insert(std::upper_bound(placed.begin(), placed.end(), index, by_offset), index);
  }
  return total;
}

uint64_t keep_recorded_layout(std::vector<Symbol>& symbols, std::vector<uint32_t> order) {
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return symbols[a].address_b < symbols[b].address_b; });
  uint64_t total = 0;
  uint64_t range_address = 0;  // the run of touching allocations being placed
  uint64_t range_end = 0;
  uint64_t range_offset = 0;
  for (const uint32_t index : order) {
    Symbol& symbol = symbols[index];
    if (symbol.address_b > range_end || total == 0) {
      range_address = symbol.address_b;
      range_offset = total;
      range_end = range_address;
    }
    symbol.workspace_offset = range_offset + (symbol.address_b - range_address);
    range_end = std::max(range_end, symbol.address_b + symbol.size);
    total = align_up(range_offset + (range_end - range_address));
  }
  return total;
}

}  // namespace

void plan_memory(LinkedGraph& linked) {
  std::vector<uint32_t> internals = internal_symbols(linked);
  linked.workspace_size = is_chain(linked.recording)
                              ? pack_by_lifetime(linked.symbols, std::move(internals))
                              : keep_recorded_layout(linked.symbols, std::move(internals));
}

}  // namespace pygraph
