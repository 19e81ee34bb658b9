#include "pack.h"

#include <algorithm>
#include <span>

namespace pygraph {
namespace {

// The lowest offset in `place` that is free for the symbol's whole lifetime.
uint64_t lowest_offset(const std::vector<Symbol>& symbols, const Arena& place, uint32_t index,
                       const Interference& interference) {
  const Symbol& symbol = symbols[index];
  uint64_t offset = 0;
  for (const uint32_t other : place.placed) {
    const Symbol& neighbour = symbols[other];
    if (!interference.conflict(index, other)) continue;
    if (offset + symbol.size <= neighbour.workspace_offset) break;  // the gap below fits
    offset = std::max(offset, align_up(neighbour.workspace_offset + neighbour.size));
  }
  return offset;
}

// The first of `arenas` that has room for the symbol, from 1 on; 0 if none has.
uint32_t find_room(std::vector<Symbol>& symbols, std::span<const Arena> arenas, uint32_t index,
                   const Interference& interference) {
  Symbol& symbol = symbols[index];
  for (uint32_t i = 1; i < arenas.size(); ++i) {
    const Arena& place = arenas[i];
    if (symbol.first < place.first || symbol.last > place.last) continue;
    symbol.workspace_offset = lowest_offset(symbols, place, index, interference);
    if (symbol.workspace_offset + symbol.size <= place.size) return i;
  }
  return 0;
}

// Makes a block for the symbol: of its own, or in the memory of one of `reusable_outputs`, which is
// taken from them. What wastes least of an output's memory comes first.
Arena add_block(std::vector<Region>& regions, const Symbol& symbol,
                std::vector<ReusableOutput>& reusable_outputs) {
  auto best = reusable_outputs.end();
  const auto waste = [&](const ReusableOutput& output) {
    return symbol.size - std::min(symbol.size, output.size);
  };
  for (auto output = reusable_outputs.begin(); output != reusable_outputs.end(); ++output) {
    if (symbol.last > output->begin || !is_about_as_large(symbol.size, output->size)) continue;
    if (best == reusable_outputs.end() || waste(*output) < waste(*best)) best = output;
  }
  if (best == reusable_outputs.end()) {
    regions.push_back({.size = symbol.size});
    return {symbol.size, 0, Allocation::kNever, {}};
  }
  const ReusableOutput output = *best;
  reusable_outputs.erase(best);
  regions.push_back({.output = output.slot, .size = std::max(symbol.size, output.size)});
  return {regions.back().size, 0, output.begin, {}};
}

}  // namespace

void pack_by_lifetime(LinkedGraph& linked, std::vector<uint32_t> order, std::vector<Arena> arenas,
                      std::vector<ReusableOutput> reusable_outputs, uint64_t smallest_block,
                      const Interference& interference) {
  std::vector<Symbol>& symbols = linked.symbols;
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return symbols[a].size > symbols[b].size; });
  for (const uint32_t index : order) {
    Symbol& symbol = symbols[index];
    symbol.region = find_room(symbols, arenas, index, interference);
    if (symbol.region == 0 && smallest_block > 0 && symbol.size >= smallest_block) {
      arenas.push_back(add_block(linked.regions, symbol, reusable_outputs));
      symbol.region = static_cast<uint32_t>(linked.regions.size());
    }
    Arena& place = arenas[symbol.region];
    symbol.workspace_offset = lowest_offset(symbols, place, index, interference);
    if (symbol.region == 0) {
      const uint64_t end = align_up(symbol.workspace_offset + symbol.size);
      linked.workspace_size = std::max(linked.workspace_size, end);
    }
    const auto by_offset = [&](uint32_t a, uint32_t b) {
      return symbols[a].workspace_offset < symbols[b].workspace_offset;
    };
    place.placed.insert(
        std::upper_bound(place.placed.begin(), place.placed.end(), index, by_offset), index);
  }
}

}  // namespace pygraph
