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

// Recognises numbers that were computed from addresses. Between the recordings, each symbol's
// address differs by a distinct number, its displacement. A number that is computed from addresses
// differs by the same computation on their displacements, and its value is that computation on the
// addresses. Both conditions are checked, because with many displacements the difference of two
// host pointers may meet one of them by chance.
class Displacements {
 public:
  explicit Displacements(const std::vector<Symbol>& symbols);
  // Whether a number may be an address plus a constant; or the difference or sum of an address in
  // one of `used` and an address in another symbol. In bytes, or in elements of up to 16 bytes;
  // also negated.
  bool explain(const Number& number, const std::vector<uint32_t>& used) const;

 private:
  // Whether factor * number is an address plus `other`, or minus it.
  bool is_computed(const Number& number, uint64_t factor, const Symbol* other) const;

  const std::vector<Symbol>& symbols_;
  std::unordered_multimap<uint64_t, uint32_t> by_displacement_;
};

}  // namespace pygraph
