// Which of the caller's inputs a recorded computation may write to.
#pragma once

#include <cstdint>
#include <vector>

#include "pygraph/recording.h"

namespace pygraph {

// Slots, in order. Derived from the recording, and not from the contents of inputs after a call,
// because a kernel may write the value that was there, or write under a condition.
//
// * An operator writes to Operator::writes. A foreign operator may also write to all memory that
//   its nodes' addresses point to.
// * A kernel with known accesses writes to Node::writes.
// * A copy or a fill writes to its destination.
// * Any other kernel may write to all memory that its addresses point to.
std::vector<uint32_t> written_inputs(const Recording& recording);

}  // namespace pygraph
