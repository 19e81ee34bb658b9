// Branches: which nodes of a recorded chain may run at the same time.
//
// A stream runs one kernel after the other. The projections to queries, keys and values read one
// tensor and write three; on a stream each waits for the one before, while most of the GPU is idle.
// If the nodes' accesses are known (Node::has_known_accesses), a node has to wait only for nodes
// whose results it uses, and for nodes that use memory which it overwrites:
//
//     LN -> Q -> K -> V -> attention             LN -+-> Q -+-> attention
//                                                    +-> K -+
//                                                    +-> V -+
//
//   * Two nodes conflict if they use one symbol and at least one of them writes to it. An input is
//     another symbol than the next, but may lie in the same memory: if any input is written, all
//     inputs are one. Other symbols never overlap, wherever they are placed: memory is planned for
//     the order that is found here.
//   * The nodes of one operator stay in order: a library may hand something over between them.
//   * A node that nothing was declared of, such as a library's kernel that may find its addresses
//     in device memory, waits for all before it, and all after it wait for it.
//   * Every edge is a full one: no kernel starts before the nodes that it waits for have ended,
//   also
//     where it was captured so (docs/decisions/0026).
//   * At most `lanes` nodes run at a time. Each goes behind a node it waits for where that is the
//     end of a lane, else to a lane whose end it waits for anyway.
#pragma once

#include <optional>
#include <vector>

#include "order.h"
#include "pygraph/link.h"

namespace pygraph {

struct Branches {
  std::vector<Edge> edges;  // of the whole recording: those inside of child graphs as they were
  ExecutionOrder order;
  uint32_t lanes = 1;  // used
};

// None if nothing can run beside anything else. Needs relocations, and that the recorded order is a
// chain.
std::optional<Branches> find_branches(const LinkedGraph& linked, uint32_t lanes);

}  // namespace pygraph
