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

bool fits(const DonatedInput& input, const Symbol& output, const Uses& uses) {
  return input.size >= output.size && is_about_as_large(input.size, output.size) &&
         uses.input_end[input.slot] <= uses.output_begin[output.slot];
}

// Outputs, largest first, take the largest donor that is not too large: smaller outputs can take
// smaller ones. Among equals the one that is used longest: earlier outputs can take the others.
// Then those that have a larger one than they need take what is still left. Returns the rest.
std::vector<DonatedInput> fill_one_by_one(LinkedGraph& linked, const Uses& uses,
                                          std::span<const DonatedInput> donated) {
  std::vector<DonatedInput> donors;
  for (const DonatedInput& input : donated) {
    if (input.size >= kSmallestDonation) donors.push_back(input);
  }
  const auto place_in_order = [&](const DonatedInput& input) {
    return std::pair(input.size, uses.input_end[input.slot]);
  };
  std::ranges::stable_sort(donors, std::greater(), place_in_order);
  std::vector<Taken> taken;
  for (const Symbol* output : outputs_by_size(linked)) {
    const auto donor = std::ranges::find_if(
        donors, [&](const DonatedInput& input) { return fits(input, *output, uses); });
    if (donor == donors.end()) continue;
    taken.push_back({output, *donor});
    donors.erase(donor);
  }
  for (Taken& pair : taken) {
    const auto smallest = std::find_if(donors.rbegin(), donors.rend(), [&](const auto& input) {
      return input.size < pair.donor.size && fits(input, *pair.output, uses);
    });
    if (smallest != donors.rend()) std::swap(*smallest, pair.donor);
    linked.placements[pair.output->slot] = {.input = pair.donor.slot};
    std::ranges::stable_sort(donors, std::greater(), place_in_order);
  }
  return donors;
}

// Donors that are too large for any one output take several of those that may share: largest first,
// as many as fit. A donor whose last use is late has the smallest choice and goes first.
void fill_side_by_side(LinkedGraph& linked, const Uses& uses, std::vector<DonatedInput> donors,
                       std::span<const uint32_t> sharing) {
  std::vector<const Symbol*> outputs = outputs_by_size(linked);
  std::erase_if(outputs, [&](const Symbol* output) {
    return output->size < kSmallestDonation || linked.placements[output->slot] ||
           std::ranges::find(sharing, output->slot) == sharing.end();
  });
  std::ranges::stable_sort(donors, std::greater(),
                           [&](const DonatedInput& input) { return uses.input_end[input.slot]; });
  for (const DonatedInput& donor : donors) {
    std::vector<std::pair<const Symbol*, uint64_t>> placed;  // with offsets
    uint64_t end = 0;
    for (const Symbol* output : outputs) {
      const bool is_late = uses.input_end[donor.slot] <= uses.output_begin[output->slot];
      if (!is_late || end + output->size > donor.size) continue;
      placed.emplace_back(output, end);
      end += align_up(output->size);
    }
    if (!is_about_as_large(donor.size, end)) continue;
    for (const auto& [output, offset] : placed) {
      linked.placements[output->slot] = {.input = donor.slot, .offset = offset};
      std::erase(outputs, output);
    }
  }
}

}  // namespace

void place_outputs(LinkedGraph& linked, const Uses& uses, const MemoryOptions& options) {
  std::vector<DonatedInput> left = fill_one_by_one(linked, uses, options.donated);
  fill_side_by_side(linked, uses, std::move(left), options.sharing);
}

}  // namespace pygraph
