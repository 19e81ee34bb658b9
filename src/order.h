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

// By positions of top-level nodes, as lifetimes are (Allocation). Every node before begin_of(p) has
// ended when node p begins. Memory whose last use is before that may serve p.
//
// In a chain, where each node follows the one before it, that is p itself, unless kernels overlap:
// one that was launched with programmatic stream serialization starts before its predecessor ends.
// Such nodes form a step with their predecessors, and begin_of is where the step begins. When the
// next step starts, every node of the ones before has ended: the capture leaves it with one edge,
// from the last of them, and everything that frees memory in stream order, such as PyTorch's
// allocator, relies on a stream's work being complete when its last kernel is.
//
// In a graph with branches (branches.h), a node does not wait for all nodes before it; `ended` says
// for which, by position.
struct ExecutionOrder {
  std::vector<uint32_t> step_begin;
  bool is_chain = true;
  std::vector<NodeSet> ended = {};  // empty in a chain

  uint32_t begin_of(uint32_t position) const {
    return position < step_begin.size() ? step_begin[position] : position;
  }
};

// None if the graph has branches, or edges of another kind.
std::optional<ExecutionOrder> order_of_chain(const Recording& recording);

}  // namespace pygraph
