// The order of execution: which nodes have ended when a node begins.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "node_set.h"
#include "pygraph/recording.h"

namespace pygraph {

// The kernel at the end of the edge may start when all blocks of the other have allowed it or
// ended (programmatic stream serialization).
constexpr abi::EdgeData kProgrammatic{.from_port = 1, .to_port = 0, .type = 1, .reserved = {}};

// Counts in positions of top-level nodes, as lifetimes do (Allocation). Every node before
// begin_of(p) has ended when node p begins, so memory whose last use is before begin_of(p) is free
// for p.
//
// In a chain, where each node follows the one before it, begin_of(p) is p itself, unless kernels
// overlap: a kernel that was launched with programmatic stream serialization may start before its
// predecessor ends. Such nodes form a *step* with their predecessors, and begin_of(p) is the first
// node of the step. When the next step starts, every node of earlier steps has ended. The graph has
// only one edge for that, from the last node of the step, but everything that frees memory in
// stream order, such as PyTorch's allocator, relies on it, too: a stream's work is complete when
// its last kernel is.
//
// In a graph with branches, a node does not wait for all nodes before it. `ended` has, by position,
// the nodes that have ended when the node begins, and begin_of(p) is the first one that may not
// have. Such graphs are those whose function forked its stream, and those that get branches later
// (branches.h).
struct ExecutionOrder {
  std::vector<uint32_t> step_begin;
  bool is_chain = true;
  std::vector<NodeSet> ended = {};  // empty in a chain

  uint32_t begin_of(uint32_t position) const {
    return position < step_begin.size() ? step_begin[position] : position;
  }
};

// Whether each node follows the one before it, and no other.
bool is_chain(const Recording& recording);

// Replaces programmatic edges between top-level nodes by full ones, as a graph with branches has
// (docs/decisions/0026). Returns whether there were any.
bool make_edges_full(Recording& recording);

// Of the recording as it is. None if it has an edge of a kind that is not known or to an earlier
// node; or branches and programmatic edges, or more than kMostBranchedNodes nodes.
std::optional<ExecutionOrder> find_order(const Recording& recording);

// A graph with branches needs a set of nodes per node: 8 MB in all.
constexpr size_t kMostBranchedNodes = 8192;

}  // namespace pygraph
