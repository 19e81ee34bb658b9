// Places internal memory: in the workspace, or in inputs that nothing needs any more.
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
// If kernels may overlap, lifetimes are counted in steps of overlapping kernels (order.h). In a
// graph with branches (the function forked its stream, or PyGraph made them), two allocations share
// bytes if the edges order all uses of one before those of the other (interference.h). Where the
// order is not known (order.h), the allocator's layout is kept: allocations share an address if
// they shared it while recording, which stream order made safe.
//
// A backward frees its saved tensors one by one, and in an uncaptured run its results take their
// place, so its memory hardly grows. A graph gets all its memory before it starts, and would need
// memory for both. Hence donated inputs are used twice: an output, or several side by
// side, takes over the memory of an input whose last use comes before the outputs' first use.
// Internal memory is placed in the other donated inputs.
//
// The largest allocations can get blocks of their own, in which smaller ones are placed beside and
// after them; or they lie in an output that is written later.
#include "plan_memory.h"

#include <algorithm>
#include <span>

#include "hidden_uses.h"
#include "interference.h"
#include "order.h"
#include "output_placement.h"
#include "pack.h"

namespace pygraph {
namespace {

std::vector<uint32_t> internal_symbols(const LinkedGraph& linked) {
  std::vector<uint32_t> internals;
  for (uint32_t i = 0; i < linked.symbols.size(); ++i) {
    if (linked.symbols[i].kind == SymbolKind::kInternal) internals.push_back(i);
  }
  return internals;
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

// Internal memory begins where what comes before its uses has ended. (A hidden use waits for the
// node that was given the address, so it finds no less ended.) What was never freed (libraries'
// workspaces) is needed until its last use, hidden ones included.
void limit_lifetimes(LinkedGraph& linked, const ExecutionOrder& order,
                     std::span<const HiddenUse> hidden) {
  std::vector<uint32_t> ends;
  for (const HiddenUse& use : hidden) ends.push_back(use.end);
  std::vector<uint32_t> begins(linked.symbols.size(), Allocation::kNever);
  for (const Relocation& relocation : linked.relocations) {
    const uint32_t position = linked.recording.nodes[relocation.node].position;
    uint32_t& end = ends[relocation.symbol];
    end = std::max(end, position + 1);
    uint32_t& begin = begins[relocation.symbol];
    begin = std::min(begin, order.begin_of(position));
  }
  for (size_t i = 0; i < linked.symbols.size(); ++i) {
    Symbol& symbol = linked.symbols[i];
    if (symbol.kind != SymbolKind::kInternal) continue;
    if (symbol.last == Allocation::kNever) symbol.last = std::max(symbol.first, ends[i]);
    symbol.first =
        order.is_chain ? order.begin_of(symbol.first) : std::min(symbol.first, begins[i]);
  }
}

Uses find_uses(const LinkedGraph& linked, const ExecutionOrder& order,
               std::span<const HiddenUse> hidden, std::span<const DonatedInput> donated) {
  Uses uses;
  uses.input_end.assign(linked.recording.inputs.size(), 0);
  uses.output_begin.assign(linked.recording.outputs.size(), Allocation::kNever);
  const auto note = [&](const Symbol& symbol, uint32_t position, uint32_t end) {
    if (symbol.kind == SymbolKind::kInput) {
      uint32_t& known = uses.input_end[symbol.slot];
      known = std::max(known, end);
    } else if (symbol.kind == SymbolKind::kOutput) {
      uint32_t& known = uses.output_begin[symbol.slot];
      known = std::min(known, order.begin_of(position));
    }
  };
  for (const Relocation& relocation : linked.relocations) {
    const uint32_t position = linked.recording.nodes[relocation.node].position;
    note(linked.symbols[relocation.symbol], position, position + 1);
  }
  for (size_t i = 0; i < linked.symbols.size(); ++i) {
    if (hidden[i].end > 0) note(linked.symbols[i], hidden[i].begin, hidden[i].end);
  }
  for (const DonatedInput& input : donated) {
    uint32_t& end = uses.input_end[input.slot];
    for (const uint32_t view : input.views) end = std::max(end, uses.input_end[view]);
  }
  return uses;
}

// A region in every donated input that is large enough, from its last use to its next owners'
// first.
std::vector<Arena> make_regions(LinkedGraph& linked, const Uses& uses,
                                std::span<const DonatedInput> donated) {
  std::vector<DonatedInput> inputs(donated.begin(), donated.end());
  std::ranges::stable_sort(inputs, {}, &DonatedInput::size);
  std::vector<Arena> arenas;
  for (const DonatedInput& input : inputs) {
    if (input.size < kSmallestDonation) continue;
    uint32_t last = Allocation::kNever;
    for (uint32_t output = 0; output < linked.placements.size(); ++output) {
      if (linked.placements[output].input != input.slot) continue;
      last = std::min(last, uses.output_begin[output]);
    }
    linked.regions.push_back({.input = input.slot, .size = input.size});
    arenas.push_back({input.size, uses.input_end[input.slot], last, {}});
  }
  return arenas;
}

// Outputs whose memory is free until their first use: those that do not take over an input's.
std::vector<ReusableOutput> find_reusable_outputs(const LinkedGraph& linked, const Uses& uses) {
  std::vector<ReusableOutput> reusable_outputs;
  for (const Symbol& symbol : linked.symbols) {
    if (symbol.kind != SymbolKind::kOutput || linked.placements[symbol.slot]) continue;
    reusable_outputs.push_back({symbol.slot, symbol.size, uses.output_begin[symbol.slot]});
  }
  return reusable_outputs;
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

bool is_used(const LinkedGraph& linked, const DonatedInput& input) {
  return std::ranges::find(linked.regions, input.slot, &Region::input) != linked.regions.end() ||
         std::ranges::find(linked.placements, input.slot, &OutputPlacement::input) !=
             linked.placements.end();
}

}  // namespace

void plan_memory(LinkedGraph& linked, const MemoryOptions& options) {
  if (const std::optional<ExecutionOrder> order = find_order(linked.recording)) {
    plan_memory(linked, options, *order);
    return;
  }
  linked.placements.assign(linked.recording.outputs.size(), {});
  linked.workspace_size = keep_recorded_layout(linked.symbols, internal_symbols(linked));
  linked.workspace_size_if_kept = linked.workspace_size;
}

void plan_memory(LinkedGraph& linked, const MemoryOptions& options, const ExecutionOrder& order) {
  linked.placements.assign(linked.recording.outputs.size(), {});
  const std::vector<HiddenUse> hidden = find_hidden_uses(linked);
  limit_lifetimes(linked, order, hidden);
  const Uses uses = find_uses(linked, order, hidden, options.donated);
  place_outputs(linked, uses, options);
  std::vector<Arena> arenas = make_regions(linked, uses, options.donated);
  arenas.insert(arenas.begin(), Arena{~uint64_t{0}, 0, Allocation::kNever, {}});
  pack_by_lifetime(linked, internal_symbols(linked), std::move(arenas),
                   find_reusable_outputs(linked, uses), options.smallest_block,
                   Interference(linked, order, hidden));
  drop_empty_regions(linked);
  for (const DonatedInput& input : options.donated) {
    if (is_used(linked, input)) linked.donated.push_back(input);
  }
  linked.workspace_size_if_kept = linked.workspace_size;
  for (Region& region : linked.regions) {
    if (region.input == Region::kOwnBlock) continue;
    region.fallback_offset = linked.workspace_size_if_kept;
    linked.workspace_size_if_kept += align_up(region.size);
  }
}

}  // namespace pygraph
