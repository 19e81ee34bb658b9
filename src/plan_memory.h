// Places the memory of a linked graph; see plan_memory.cc.
#pragma once

#include "order.h"
#include "pygraph/link.h"

namespace pygraph {

// As plan_memory of link.h, for nodes in another order than the recorded one.
void plan_memory(LinkedGraph& linked, const MemoryOptions& options, const ExecutionOrder& order);

}  // namespace pygraph
