// How many nodes a capture has: the clock of a recording.
#pragma once

#include <cstdint>

#include "pygraph/driver.h"

namespace pygraph::bindings {

// Of the capture in progress on `stream`; `otherwise` where there is none. Does not throw.
inline uint32_t count_nodes(const Driver& driver, CUstream stream, uint32_t otherwise = 0) {
  int status = 0;
  CUgraph graph = nullptr;
  size_t count = 0;
  if (driver.stream_get_capture_info(stream, &status, nullptr, &graph, nullptr, nullptr, nullptr) ==
          abi::kSuccess &&
      status == abi::kCaptureStatusActive &&
      driver.graph_get_nodes(graph, nullptr, &count) == abi::kSuccess) {
    return static_cast<uint32_t>(count);
  }
  return otherwise;
}

}  // namespace pygraph::bindings
