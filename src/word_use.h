// The use of the words of a kernel's parameters, as far as their layout shows.
#pragma once

#include <vector>

#include "pygraph/link.h"

namespace pygraph {

enum class WordUse : uint8_t {
  kUsed,     // a parameter of its own, or the address of a copy or fill
  kPerhaps,  // part of a larger parameter, whose padding holds leftovers
  kNumber,   // spans several parameters, so it is no address
};

// Where a kernel's parameters lie in its image; empty if the driver does not say.
std::vector<Range> parameter_layout(const Driver& driver, const Node& node);

WordUse use_of_word(const Node& node, const std::vector<Range>& layout, uint32_t offset);

// Whether a parameter of 8 bytes or less that is no word by itself differs.
bool have_other_numbers(const Node& a, const Node& b, const std::vector<Range>& layout);

}  // namespace pygraph
