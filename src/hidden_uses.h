// Uses of memory that do not appear as relocations.
//
// A kernel may store an address in device memory, which a later kernel reads. PyTorch's own
// operators do so only within one operator (grouped products and batched solvers make tables of
// addresses), and the compiler's kernels never do. Each other kernel is
// assumed to use all memory that any earlier kernel was given.
#pragma once

#include <cstdint>
#include <vector>

#include "pygraph/link.h"

namespace pygraph {

struct HiddenUse {
  uint32_t begin = Allocation::kNever;  // the position from which on an address of it may be stored
  uint32_t end = 0;  // one past the last node that may use it; 0: no address is stored
};

// Whether the kernel may take addresses from memory that an earlier one has left there.
bool may_take_addresses(const Recording& recording, const Node& node);

// PyTorch's own operator of the kernel, if its kernels may leave addresses in memory for each
// other; else null.
const Operator* operator_with_tables(const Recording& recording, const Node& node);

// By symbol.
std::vector<HiddenUse> find_hidden_uses(const LinkedGraph& linked);

}  // namespace pygraph
