// How PyTorch's random kernels see their generator, and how a replay advances it.
//
// While capturing, a kernel gets a PhiloxCudaState by value: the address of the generator's seed,
// the address of its offset, and how much the graph has drawn before this kernel. It reads both
// addresses when it runs. The graph relocates both addresses to 16 bytes of its own, which each
// replay fills with the seed and the offset that it reserved. So a replay draws the same numbers as
// an uncaptured run, each replay draws new ones, and no two graphs share the 16 bytes.
//
// (Writing the values into the kernels' parameters instead, marked as not captured, would save the
// copy; but attention kernels store seed and offset for their backward only if marked as captured.)
//
// No public function returns the two addresses and the total drawn. A sentinel does: one more
// random kernel, captured last, whose own state has all three. It is removed from the graph.
#pragma once

#include <ATen/core/Generator.h>

#include "pygraph/recording.h"

namespace pygraph::bindings {

// Takes the last `count` nodes off the recording, each a sentinel drawn from one generator, and
// fills recording.random from them. Throws NotRelocatable if they are not what they should be.
// Returns the removed nodes, to be destroyed in the graph that is instantiated.
std::vector<CUgraphNode> take_random_sentinels(Recording& recording, size_t count);

struct PhiloxPosition {
  uint64_t seed = 0;
  uint64_t offset = 0;
};

// Advances the generator by `increment` and returns its offset before. Thread-safe.
PhiloxPosition reserve_random(const at::Generator& generator, uint64_t increment);

// Undoes a reservation for a launch that did not happen, unless other code has drawn since.
// Thread-safe.
void unreserve_random(const at::Generator& generator, PhiloxPosition position, uint64_t increment);

}  // namespace pygraph::bindings
