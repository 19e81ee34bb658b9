// Uses of memory that no relocation shows.
//
// A kernel may store an address, or compute on one, for a later kernel to take from memory.
// PyTorch's own operators do no such thing from one operator to the next (but within one: products
// of groups and batched solvers make tables of addresses), and the compiler's kernels never do. Of
// what others do nothing is known: whatever one of them was given, each later one may use.
#pragma once

#include <cstdint>
#include <vector>

#include "pygraph/link.h"

namespace pygraph {

struct HiddenUse {
  uint32_t begin = Allocation::kNever;  // the position from which on the address may be known
  uint32_t end = 0;  // one past the last node that may use it; 0: nobody knows it
};

// By symbol.
std::vector<HiddenUse> find_hidden_uses(const LinkedGraph& linked);

}  // namespace pygraph
