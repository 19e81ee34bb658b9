#include "computed_numbers.h"

#include <algorithm>
#include <array>
#include <cstdio>

namespace pygraph {
namespace {

// How far from an address a number may lie that was computed from it: more than all memory of a
// GPU.
constexpr uint64_t kFarthest = uint64_t{1} << 38;

// The same for the sum or difference of addresses in two allocations. The host's memory begins low,
// so that a pointer to it may look like a large difference.
constexpr uint64_t kBesideAddresses = uint64_t{64} << 10;

}  // namespace

std::string describe(const Number& number) {
  std::array<char, 64> words{};
  std::snprintf(words.data(), words.size(), " (byte %u: %#llx, %#llx)", number.offset,
                static_cast<unsigned long long>(number.word_a),
                static_cast<unsigned long long>(number.word_b));
  return words.data();
}

Displacements::Displacements(const std::vector<Symbol>& symbols) : symbols_(symbols) {
  for (uint32_t i = 0; i < symbols.size(); ++i) {
    const uint64_t displacement = symbols[i].address_b - symbols[i].address_a;
    if (displacement != 0) by_displacement_.emplace(displacement, i);  // random states have none
  }
}

bool Displacements::is_computed(const Number& number, uint64_t factor, const Symbol* other) const {
  const auto known = [&](uint64_t difference, uint64_t value, uint64_t reach) {
    const auto [first, last] = by_displacement_.equal_range(difference);
    return std::any_of(first, last, [&](const auto& entry) {
      const Symbol& symbol = symbols_[entry.second];
      const uint64_t farthest = other == nullptr ? reach : reach + symbol.size;
      return value - symbol.address_a + farthest <= 2 * farthest;
    });
  };
  const uint64_t value = factor * number.word_a;
  const uint64_t difference = factor * (number.word_b - number.word_a);
  if (other == nullptr) return known(difference, value, kFarthest);
  const uint64_t displacement = other->address_b - other->address_a;
  const uint64_t reach = other->size + kBesideAddresses;
  return known(difference + displacement, value + other->address_a, reach) ||
         known(difference - displacement, value - other->address_a, reach);
}

bool Displacements::explain(const Number& number, const std::vector<uint32_t>& used) const {
  for (const uint64_t scale : {1, 2, 4, 8, 16}) {
    for (const uint64_t factor : {scale, -scale}) {
      if (is_computed(number, factor, nullptr)) return true;
      for (const uint32_t index : used) {
        if (is_computed(number, factor, &symbols_[index])) return true;
      }
    }
  }
  return false;
}

}  // namespace pygraph
