#include "output_placement.h"

#include <algorithm>
#include <functional>
#include <span>
#include <utility>

#include "pack.h"

namespace pygraph {
namespace {

std::vector<const Symbol*> outputs_by_size(const LinkedGraph& linked) {
  std::vector<const Symbol*> outputs;
  for (const Symbol& symbol : linked.symbols) {
    if (symbol.kind == SymbolKind::kOutput) outputs.push_back(&symbol);
  }
  std::ranges::stable_sort(outputs, std::greater(), &Symbol::size);
  return outputs;
}

struct Taken {
  const Symbol* output;
  DonatedInput donor;
};

bool fits(const DonatedInput& input, const Symbol& output, const Uses& uses,
          IsCloseInSize is_close) {
  return input.size >= output.size && is_close(input.size, output.size) &&
         uses.input_end[input.slot] <= uses.output_begin[output.slot];
}

// Outputs, largest first, take the largest donor that is not too large: smaller outputs can take
// smaller ones. Among equals the one that is used longest: earlier outputs can take the others.
// Then those that have a larger one than they need take what is still left. Erases what is taken.
void fill_one_by_one(LinkedGraph& linked, const Uses& uses, std::vector<DonatedInput>& donors,
                     IsCloseInSize is_close) {
  const auto place_in_order = [&](const DonatedInput& input) {
    return std::pair(input.size, uses.input_end[input.slot]);
  };
  std::ranges::stable_sort(donors, std::greater(), place_in_order);
  std::vector<Taken> taken;
  for (const Symbol* output : outputs_by_size(linked)) {
    if (linked.placements[output->slot]) continue;
    const auto donor = std::ranges::find_if(
        donors, [&](const DonatedInput& input) { return fits(input, *output, uses, is_close); });
    if (donor == donors.end()) continue;
    taken.push_back({output, *donor});
    donors.erase(donor);
  }
  for (Taken& pair : taken) {
    const auto smallest = std::find_if(donors.rbegin(), donors.rend(), [&](const auto& input) {
      return input.size < pair.donor.size && fits(input, *pair.output, uses, is_close);
    });
    if (smallest != donors.rend()) std::swap(*smallest, pair.donor);
    linked.placements[pair.output->slot] = {.input = pair.donor.slot};
    std::ranges::stable_sort(donors, std::greater(), place_in_order);
  }
}

// Donors that are too large for any one output take several of those that may share: largest first,
// as many as fit. A donor whose last use is late has the smallest choice and goes first. Erases
// what is taken.
void fill_side_by_side(LinkedGraph& linked, const Uses& uses, std::vector<DonatedInput>& donors,
                       std::span<const uint32_t> sharing) {
  std::vector<const Symbol*> outputs = outputs_by_size(linked);
  std::erase_if(outputs, [&](const Symbol* output) {
    return output->size < kSmallestDonation || linked.placements[output->slot] ||
           std::ranges::find(sharing, output->slot) == sharing.end();
  });
  std::ranges::stable_sort(donors, std::greater(),
                           [&](const DonatedInput& input) { return uses.input_end[input.slot]; });
  const auto takes_some = [&](const DonatedInput& donor) {
    std::vector<std::pair<const Symbol*, uint64_t>> placed;  // with offsets
    uint64_t end = 0;
    for (const Symbol* output : outputs) {
      const bool is_late = uses.input_end[donor.slot] <= uses.output_begin[output->slot];
      if (!is_late || end + output->size > donor.size) continue;
      placed.emplace_back(output, end);
      end += align_up(output->size);
    }
    if (!is_about_as_large(donor.size, end)) return false;
    for (const auto& [output, offset] : placed) {
      linked.placements[output->slot] = {.input = donor.slot, .offset = offset};
      std::erase(outputs, output);
    }
    return true;
  };
  std::vector<DonatedInput> left;
  for (const DonatedInput& donor : donors) {
    if (!takes_some(donor)) left.push_back(donor);
  }
  donors = std::move(left);
}

}  // namespace

// Donors that would otherwise take nothing take outputs of half their size, too: an output that has
// no donor needs new memory while all donors are alive.
void place_outputs(LinkedGraph& linked, const Uses& uses, const MemoryOptions& options) {
  std::vector<DonatedInput> donors;
  for (const DonatedInput& input : options.donated) {
    if (input.size >= kSmallestDonation) donors.push_back(input);
  }
  fill_one_by_one(linked, uses, donors, is_about_as_large);
  fill_side_by_side(linked, uses, donors, options.sharing);
  fill_one_by_one(linked, uses, donors, is_at_most_twice_as_large);
}

}  // namespace pygraph
