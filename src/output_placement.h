// Which outputs take the place of donated inputs; see plan_memory.cc.
#pragma once

#include <cstdint>
#include <vector>

#include "pygraph/link.h"

namespace pygraph {

// The nodes that use each input and output, as lifetimes are counted.
struct Uses {
  std::vector<uint32_t> input_end;     // by input: one past its last use, or its views'
  std::vector<uint32_t> output_begin;  // by output: the step of its first use
};

// Smaller pieces do not pay: each address that changes between calls costs host time.
constexpr uint64_t kSmallestDonation = uint64_t{1} << 20;

// Fills `linked.placements`.
void place_outputs(LinkedGraph& linked, const Uses& uses, const MemoryOptions& options);

}  // namespace pygraph
