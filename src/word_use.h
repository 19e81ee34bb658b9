// What a kernel does with the words of its parameters, as far as their layout tells.
#pragma once

#include <optional>
#include <unordered_set>
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
// can be computed from displacements.
class Displacements {
 public:
  explicit Displacements(const std::vector<Symbol>& symbols);
  // Whether a word that differs by so much may be an address, or the sum or difference of an
  // address of one of `used` and another one: in bytes or elements of up to 16, or negated.
  bool explain(uint64_t difference, const std::vector<uint32_t>& used) const;

 private:
  const std::vector<Symbol>& symbols_;
  std::unordered_set<uint64_t> all_;
};

}  // namespace pygraph
