#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <vector>

#include "pygraph/stream_slots.h"

namespace pygraph::bindings {

// The state of one replay.
struct Launch {
  CallStream stream;
  std::vector<uint64_t> addresses;    // by slot
  std::vector<c10::Storage> outputs;  // by block
  std::vector<c10::DataPtr> regions;  // by region; none for those in an input
  bool donated = false;
  int poison = -1;
};

}  // namespace pygraph::bindings
