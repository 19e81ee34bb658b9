#include "word_use.h"

#include <algorithm>

namespace pygraph {
namespace {

constexpr uint64_t kWord = sizeof(uint64_t);

// How far from an address a number may lie that was computed from it: more than all memory of a
// GPU.
constexpr uint64_t kFarthest = uint64_t{1} << 38;

// The same for the sum or difference of addresses in two allocations. The host's memory begins low,
// so that a pointer to it may look like a large difference.
constexpr uint64_t kBesideAddresses = uint64_t{64} << 10;

bool is_word(const Range& param) {
  return param.size == kWord && param.address % kWord == 0;
}

}  // namespace

std::vector<Range> parameter_layout(const Driver& driver, const Node& node) {
  if (node.kind != NodeKind::kKernel || !node.packed) return node.params;
  std::vector<Range> layout;
  size_t offset = 0;
  size_t size = 0;
  size_t end = 0;
  for (size_t i = 0;
       driver.function_get_param_info(node.function, i, &offset, &size) == abi::kSuccess; ++i) {
    if (offset + size > node.image.size()) return {};
    layout.push_back({offset, size});
    end = std::max(end, offset + size);
  }
  // The driver may have refused to answer before the last parameter.
  return end + kWord > node.image.size() ? layout : std::vector<Range>{};
}

WordUse use_of_word(const Node& node, const std::vector<Range>& layout, uint32_t offset) {
  if (node.kind != NodeKind::kKernel) return WordUse::kUsed;
  if (layout.empty()) return WordUse::kPerhaps;
  for (const Range& param : layout) {
    if (is_word(param) && param.address == offset) return WordUse::kUsed;
    const bool is_inside = param.address <= offset && offset + kWord <= param.address + param.size;
    if (is_inside) return WordUse::kPerhaps;
  }
  return WordUse::kNumber;
}

bool have_other_numbers(const Node& a, const Node& b, const std::vector<Range>& layout) {
  return std::ranges::any_of(layout, [&](const Range& param) {
    if (param.size > kWord || is_word(param)) return false;
    const auto begin = a.image.begin() + static_cast<ptrdiff_t>(param.address);
    return !std::equal(begin, begin + static_cast<ptrdiff_t>(param.size),
                       b.image.begin() + static_cast<ptrdiff_t>(param.address));
  });
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
