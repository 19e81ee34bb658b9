// Where internal memory lives: in the workspace, or in inputs that nobody needs any more.
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
//
// A backward frees the tensors that were saved for it one by one as it goes, and its results come
// up to take their place: uncaptured, its memory hardly grows. A graph gets all its memory before
// it starts, so without more it would need both. Hence donated inputs of a chain serve twice: an
// output takes one over whole (its memory becomes the output's), if the input's last use comes
// before the output's first; in the others, internal memory is placed.
//
// The largest allocations can get blocks of their own, with what is smaller beside and after them.
#include <algorithm>
#include <functional>
#include <span>

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

// A piece of memory to place symbols in, while nodes [first, last) run.
struct Place {
  uint64_t size;
  uint32_t first;
  uint32_t last;
  std::vector<uint32_t> placed;  // symbols, sorted by offset
};

// The lowest offset in `place` that is free for the symbol's whole lifetime.
uint64_t lowest_offset(const std::vector<Symbol>& symbols, const Place& place,
                       const Symbol& symbol) {
  uint64_t offset = 0;
  for (const uint32_t other : place.placed) {
    const Symbol& neighbour = symbols[other];
    const bool together = symbol.first < neighbour.last && neighbour.first < symbol.last;
    if (!together) continue;
    if (offset + symbol.size <= neighbour.workspace_offset) break;  // the gap below fits
    offset = std::max(offset, align_up(neighbour.workspace_offset + neighbour.size));
  }
  return offset;
}

// The first of `places` that has room for the symbol, from 1 on; 0 if none has.
uint32_t find_room(const std::vector<Symbol>& symbols, std::span<const Place> places,
                   Symbol& symbol) {
  for (uint32_t i = 1; i < places.size(); ++i) {
    const Place& place = places[i];
    if (symbol.first < place.first || symbol.last > place.last) continue;
    symbol.workspace_offset = lowest_offset(symbols, place, symbol);
    if (symbol.workspace_offset + symbol.size <= place.size) return i;
  }
  return 0;
}

// `places`: the workspace, then one per region, small ones first. Adds regions for blocks. Sets the
// workspace's size.
void pack_by_lifetime(LinkedGraph& linked, std::vector<uint32_t> order, std::vector<Place> places,
                      uint64_t smallest_block) {
  std::vector<Symbol>& symbols = linked.symbols;
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return symbols[a].size > symbols[b].size; });
  for (const uint32_t index : order) {
    Symbol& symbol = symbols[index];
    symbol.region = find_room(symbols, places, symbol);
    if (symbol.region == 0 && smallest_block > 0 && symbol.size >= smallest_block) {
      linked.regions.push_back({.input = Region::kOwnBlock, .size = symbol.size});
      places.push_back({symbol.size, 0, Allocation::kNever, {}});
      symbol.region = static_cast<uint32_t>(linked.regions.size());
    }
    Place& place = places[symbol.region];
    symbol.workspace_offset = lowest_offset(symbols, place, symbol);
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

// The nodes that use each input and output, as lifetimes are counted.
struct Uses {
  std::vector<uint32_t> input_end;     // by input: one past its last use
  std::vector<uint32_t> output_begin;  // by output: its first use
};

Uses find_uses(const LinkedGraph& linked) {
  Uses uses;
  uses.input_end.assign(linked.recording.inputs.size(), 0);
  uses.output_begin.assign(linked.recording.outputs.size(), Allocation::kNever);
  for (const Relocation& relocation : linked.relocations) {
    const Symbol& symbol = linked.symbols[relocation.symbol];
    const uint32_t position = linked.recording.nodes[relocation.node].position;
    if (symbol.kind == SymbolKind::kInput) {
      uses.input_end[symbol.slot] = std::max(uses.input_end[symbol.slot], position + 1);
    } else if (symbol.kind == SymbolKind::kOutput) {
      uses.output_begin[symbol.slot] = std::min(uses.output_begin[symbol.slot], position);
    }
  }
  return uses;
}

// A smaller donor is not worth it: every place that moves between calls costs host time.
constexpr uint64_t kSmallestDonation = uint64_t{1} << 20;

// Outputs, largest first, take the smallest donor that fits. One that is larger by more than a
// half would keep too much memory from being freed for as long as the output lives.
void choose_donors(LinkedGraph& linked, const Uses& uses, std::span<const DonatedInput> donated) {
  std::vector<DonatedInput> donors;
  for (const DonatedInput& input : donated) {
    if (input.size >= kSmallestDonation) donors.push_back(input);
  }
  std::ranges::stable_sort(donors, {}, &DonatedInput::size);
  std::vector<const Symbol*> outputs;
  for (const Symbol& symbol : linked.symbols) {
    if (symbol.kind == SymbolKind::kOutput) outputs.push_back(&symbol);
  }
  std::ranges::stable_sort(outputs, std::greater(), &Symbol::size);
  for (const Symbol* output : outputs) {
    const auto fits = [&](const DonatedInput& input) {
      return input.size >= output->size && input.size / 3 <= output->size / 2 &&
             uses.input_end[input.slot] <= uses.output_begin[output->slot];
    };
    const auto donor = std::ranges::find_if(donors, fits);
    if (donor == donors.end()) continue;
    linked.donors[output->slot] = donor->slot;
    donors.erase(donor);
  }
}

// A region in every donated input that is large enough, from its last use to its next owner's
// first.
std::vector<Place> make_regions(LinkedGraph& linked, const Uses& uses,
                                std::span<const DonatedInput> donated) {
  std::vector<DonatedInput> hosts(donated.begin(), donated.end());
  std::ranges::stable_sort(hosts, {}, &DonatedInput::size);
  std::vector<Place> places;
  for (const DonatedInput& host : hosts) {
    if (host.size < kSmallestDonation) continue;
    uint32_t last = Allocation::kNever;
    for (uint32_t output = 0; output < linked.donors.size(); ++output) {
      if (linked.donors[output] == host.slot) last = uses.output_begin[output];
    }
    linked.regions.push_back({host.slot, host.size});
    places.push_back({host.size, uses.input_end[host.slot], last, {}});
  }
  return places;
}

// Regions that nothing was placed in would only cost time.
void drop_empty_regions(LinkedGraph& linked) {
  std::vector<uint32_t> renumbered(linked.regions.size() + 1, 0);
  for (const Symbol& symbol : linked.symbols) renumbered[symbol.region] = 1;
  std::vector<Region> kept;
  for (uint32_t r = 1; r < renumbered.size(); ++r) {
    if (renumbered[r] == 0) continue;
    kept.push_back(linked.regions[r - 1]);
    renumbered[r] = static_cast<uint32_t>(kept.size());
  }
  renumbered[0] = 0;
  for (Symbol& symbol : linked.symbols) symbol.region = renumbered[symbol.region];
  linked.regions = std::move(kept);
}

}  // namespace

void plan_memory(LinkedGraph& linked, const MemoryOptions& options) {
  std::vector<uint32_t> internals = internal_symbols(linked);
  linked.donors.assign(linked.recording.outputs.size(), kNoDonor);
  if (!is_chain(linked.recording)) {
    linked.workspace_size = keep_recorded_layout(linked.symbols, std::move(internals));
    linked.workspace_size_if_kept = linked.workspace_size;
    return;
  }
  const Uses uses = find_uses(linked);
  choose_donors(linked, uses, options.donated);
  std::vector<Place> places = make_regions(linked, uses, options.donated);
  places.insert(places.begin(), Place{~uint64_t{0}, 0, Allocation::kNever, {}});
  pack_by_lifetime(linked, std::move(internals), std::move(places), options.smallest_block);
  drop_empty_regions(linked);
  linked.workspace_size_if_kept = linked.workspace_size;
  for (Region& region : linked.regions) {
    if (region.input == Region::kOwnBlock) continue;
    region.fallback_offset = linked.workspace_size_if_kept;
    linked.workspace_size_if_kept += align_up(region.size);
  }
}

}  // namespace pygraph
