// Which of the caller's inputs a recorded computation may write to.
#pragma once

#include <cstdint>
#include <vector>

#include "pygraph/recording.h"

namespace pygraph {

// Slots, in order. It is told from what the recording knows, and not by what the inputs hold after
// a call: a kernel may write the value that was there, or write under a condition.
//
// * An operator writes what it says (Operator::writes). A foreign one may write to all that its
//   nodes' addresses lead to as well.
// * A kernel with known accesses writes what it says (Node::writes).
// * A copy or a fill writes to its destination.
// * Any other kernel may write to all that its addresses lead to.
std::vector<uint32_t> written_inputs(const Recording& recording);

}  // namespace pygraph
