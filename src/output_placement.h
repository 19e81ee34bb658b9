// Which outputs take the place of donated inputs; see plan_memory.cc.
#pragma once

#include <cstdint>
#include <vector>

#include "pygraph/join_saved.h"
#include "pygraph/link.h"

namespace pygraph {

// The nodes that use each input and output, as lifetimes are counted.
struct Uses {
  std::vector<uint32_t> input_end;     // by input: one past its last use, or its views'
  std::vector<uint32_t> output_begin;  // by output: the step of its first use
};

using IsCloseInSize = bool (*)(uint64_t place, uint64_t output);

constexpr bool is_at_most_twice_as_large(uint64_t place, uint64_t output) {
  return place / 2 <= output;
}

// Fills `linked.placements`.
void place_outputs(LinkedGraph& linked, const Uses& uses, const MemoryOptions& options);

}  // namespace pygraph
