// The order in which a graph executes, where it has one.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "pygraph/recording.h"

namespace pygraph {

// A graph whose top-level nodes run one after the other, in the order of creation. By positions of
// nodes, as lifetimes are (Allocation).
//
// Kernels may overlap in between: one that was launched with programmatic stream serialization
// starts before its predecessor ends. Such nodes form a step with their predecessors. When the next
// step starts, every node of the ones before has ended: the capture leaves it with one edge, from
// the last of them, and everything that frees memory in stream order, PyTorch's allocator among it,
// relies on a stream's work being complete where its last kernel is.
//
// So whatever begins at a node begins, for those that ended before it, with that node's step.
struct Chain {
  std::vector<uint32_t> step_begin;  // by position: the first node of its step

  uint32_t begin_of(uint32_t first) const {
    return first < step_begin.size() ? step_begin[first] : first;
  }
};

// None if the graph has branches, or edges of another kind.
std::optional<Chain> find_chain(const Recording& recording);

}  // namespace pygraph
