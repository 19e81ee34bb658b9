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
//   * Two nodes conflict if they use one symbol and at least one of them writes to it. Different
//     inputs are different symbols but may overlap in memory, so if any input is written, all
//     inputs count as one. Other symbols never overlap, because memory is planned later, for the
//     order that is found here. Memory that no symbol stands for and that a node is given counts as
//     an input; all that libraries keep for themselves counts as one more symbol, as their kernels
//     may share it.
//   * The nodes of one operator stay in order: a library may pass data between them.
//   * A node without known accesses, such as a library's kernel that may find its addresses in
//     device memory, waits for all nodes before it, and all nodes after it wait for it.
//   * Every edge is a full one: no kernel starts before the nodes that it waits for have ended,
//     even if it was captured with an edge that allows that (docs/decisions/0026).
//   * At most `lanes` nodes run at a time. A node is appended to a lane whose last node it waits
//     for; else to a lane whose last node has ended anyway when it starts; else, if all lanes are
//     busy, to the lane whose last node comes first in the recorded order.
#pragma once

#include <optional>
#include <vector>

#include "order.h"
#include "pygraph/link.h"

namespace pygraph {

// Gives each operator that uses scratch memory of a library (Recording::scratch), such as cuBLAS's
// workspace, a symbol of its own in its place, as processors rename registers. Operators that share
// nothing else can then run at the same time. Scratch memory that a node outside operators uses as
// well is not renamed.
void split_scratch(LinkedGraph& linked);

struct Branches {
  std::vector<Edge> edges;  // of the whole recording: those inside child graphs as they were
  ExecutionOrder order;
  uint32_t lanes = 1;  // used
};

// None if nothing can run beside anything else. Needs relocations, and that the recorded order is a
// chain.
std::optional<Branches> find_branches(const LinkedGraph& linked, uint32_t lanes);

}  // namespace pygraph
