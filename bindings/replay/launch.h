#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <vector>

#include "pygraph/stream_slots.h"

namespace pygraph::bindings {

// The state of one replay, from the choice of its memory to the launch.
struct Launch {
  CallStream stream;
  std::vector<uint64_t> addresses;    // by slot
  std::vector<c10::Storage> outputs;  // by block
  std::vector<c10::DataPtr> regions;  // by region; none for those in an input, or held
  bool donated = false;               // whether it uses the memory of donated inputs
  bool holds_blocks = false;          // whether the workspace contains its blocks (held_blocks.h)
  int poison = -1;                    // as in CapturedGraph::replay()
};

}  // namespace pygraph::bindings
