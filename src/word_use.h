// What a kernel does with the words of its parameters, as far as their layout tells.
#pragma once

#include <optional>
#include <unordered_map>
#include <vector>

#include "pygraph/link.h"

namespace pygraph {

enum class WordUse : uint8_t {
  kUsed,     // it is a parameter, or the address of a copy or fill
  kPerhaps,  // it lies in a larger parameter, whose padding holds leftovers
  kNumber,   // it is made of several parameters: no address
};

// Where a kernel's parameters lie in its image; empty if the driver does not say.
std::vector<Range> parameter_layout(const Driver& driver, const Node& node);

WordUse use_of_word(const Node& node, const std::vector<Range>& layout, uint32_t offset);

// Whether a parameter of 8 bytes or less that is no word by itself differs.
bool have_other_numbers(const Node& a, const Node& b, const std::vector<Range>& layout);

// Recognises numbers that were computed from addresses. Each symbol's address differs between the
// recordings by another number, its displacement; what was computed from addresses differs by what
// can be computed from displacements, and lies where the same computation leads from the addresses
// themselves. (Both must hold: displacements are so many that one alone explains, by chance, what
// two pointers to memory of the host differ by.)
class Displacements {
 public:
  explicit Displacements(const std::vector<Symbol>& symbols);
  // Whether a word may be an address, or the sum or difference of an address of one of `used` and
  // another one, plus a constant: in bytes or elements of up to 16, or negated. `word_a` and
  // `word_b` are what the recordings hold.
  bool explain(uint64_t word_a, uint64_t word_b, const std::vector<uint32_t>& used) const;

 private:
  bool is_one(uint64_t value, uint64_t difference) const;

  const std::vector<Symbol>& symbols_;
  std::unordered_multimap<uint64_t, uint64_t>
      addresses_;  // in the first recording, by displacement
};

}  // namespace pygraph
