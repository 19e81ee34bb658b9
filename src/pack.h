// Greedy packing of internal memory by lifetime; see plan_memory.cc.
#pragma once

#include <cstdint>
#include <vector>

#include "interference.h"
#include "pygraph/alignment.h"
#include "pygraph/link.h"

namespace pygraph {

// A place that is larger by more than a half would keep too much memory alive with the output.
constexpr bool is_about_as_large(uint64_t place, uint64_t output) {
  return place / 3 <= output / 2;
}

// A piece of memory to place symbols in, while nodes [first, last) run.
struct Arena {
  uint64_t size;
  uint32_t first;
  uint32_t last;
  std::vector<uint32_t> placed;  // symbols, sorted by offset
};

// An output, before its first use.
struct ReusableOutput {
  uint32_t slot;
  uint64_t size;
  uint32_t begin;
};

// `interference`: which symbols may not share bytes. `arenas`: the workspace, then one per region,
// small ones first. Adds regions for blocks, some of them in `reusable_outputs`. Sets the
// workspace's size.
void pack_by_lifetime(LinkedGraph& linked, std::vector<uint32_t> order, std::vector<Arena> arenas,
                      std::vector<ReusableOutput> reusable_outputs, uint64_t smallest_block,
                      const Interference& interference);

}  // namespace pygraph
