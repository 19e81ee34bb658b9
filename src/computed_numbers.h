// Numbers among a kernel's parameters that were computed from addresses: a difference of two
// pointers, or an address divided by the size of an element. A relocation cannot represent them.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "pygraph/link.h"

namespace pygraph {

// A word among a kernel's parameters that differs between the recordings and is no address.
struct Number {
  uint32_t offset = 0;
  uint64_t word_a = 0;
  uint64_t word_b = 0;
};

// Its place and both values, for the reason of a refusal.
std::string describe(const Number& number);

// Recognises numbers that were computed from addresses. Each symbol's address differs between the
// recordings by a distinct number, its displacement. A number computed from addresses differs by
// the same computation on the displacements, and its value is that computation on the addresses.
// Both must hold, because with many displacements one of them may match the difference of two host
// pointers by chance.
class Displacements {
 public:
  explicit Displacements(const std::vector<Symbol>& symbols);
  // Whether a number may be an address, plus any constant; or the difference or sum of an address
  // in one of `used` and one in another symbol: in bytes or elements of up to 16, or negated.
  bool explain(const Number& number, const std::vector<uint32_t>& used) const;

 private:
  // Whether factor * number is an address plus `other`, or minus it.
  bool is_computed(const Number& number, uint64_t factor, const Symbol* other) const;

  const std::vector<Symbol>& symbols_;
  std::unordered_multimap<uint64_t, uint32_t> by_displacement_;
};

}  // namespace pygraph
