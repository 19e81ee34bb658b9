// Cuts large pieces out of the workspace.
//
// The packing leaves boundaries that no allocation crosses; between two of them lies a piece that
// can be anywhere in memory.
//
//      offset |[ A ][  B  ]            piece 2: D
//             |------------------ boundary
//             |[    C   ][ D  ]        piece 1: A..C
//             +----------------> nodes
#include <algorithm>
#include <vector>

#include "pygraph/link.h"

namespace pygraph {
namespace {

struct Piece {
  uint64_t begin;
  uint64_t end;
  std::vector<uint32_t> symbols;
};

std::vector<Piece> find_pieces(const LinkedGraph& linked) {
  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < linked.symbols.size(); ++i) {
    const Symbol& symbol = linked.symbols[i];
    if (symbol.kind == SymbolKind::kInternal && symbol.region == 0) order.push_back(i);
  }
  std::ranges::sort(order, {}, [&](uint32_t i) { return linked.symbols[i].workspace_offset; });
  std::vector<Piece> pieces;
  for (const uint32_t i : order) {
    const Symbol& symbol = linked.symbols[i];
    const uint64_t begin = symbol.workspace_offset;
    if (pieces.empty() || begin >= pieces.back().end) pieces.push_back({begin, begin, {}});
    pieces.back().end = std::max(pieces.back().end, begin + symbol.size);
    pieces.back().symbols.push_back(i);
  }
  // What lies between two pieces (alignment) goes with the lower one.
  for (size_t i = 0; i + 1 < pieces.size(); ++i) pieces[i].end = pieces[i + 1].begin;
  if (!pieces.empty()) pieces.back().end = linked.workspace_size;
  return pieces;
}

}  // namespace

void split_workspace(LinkedGraph& linked, uint64_t smallest) {
  uint64_t removed = 0;
  for (const Piece& piece : find_pieces(linked)) {
    const uint64_t size = piece.end - piece.begin;
    const bool is_cut = size >= smallest;
    if (is_cut) linked.regions.push_back({.input = Region::kOwnBlock, .size = size});
    for (const uint32_t i : piece.symbols) {
      Symbol& symbol = linked.symbols[i];
      symbol.workspace_offset -= is_cut ? piece.begin : removed;
      symbol.region = is_cut ? static_cast<uint32_t>(linked.regions.size()) : 0;
    }
    if (is_cut) removed += size;
  }
  linked.workspace_size -= removed;
  linked.workspace_size_if_kept -= removed;
  for (Region& region : linked.regions) {
    if (region.input != Region::kOwnBlock) region.fallback_offset -= removed;
  }
}

}  // namespace pygraph
