// The graph of a capture in progress, and how many nodes it has: the clock of a recording.
#pragma once

#include <cstdint>

#include "pygraph/driver.h"

namespace pygraph::bindings {

// Null where `stream` does not capture. Does not throw.
inline CUgraph captured_graph(const Driver& driver, CUstream stream) {
  int status = 0;
  CUgraph graph = nullptr;
  const abi::Result result =
      driver.stream_get_capture_info(stream, &status, nullptr, &graph, nullptr, nullptr, nullptr);
  return result == abi::kSuccess && status == abi::kCaptureStatusActive ? graph : nullptr;
}

// `otherwise` where `stream` does not capture. Does not throw.
inline uint32_t count_nodes(const Driver& driver, CUstream stream, uint32_t otherwise = 0) {
  const CUgraph graph = captured_graph(driver, stream);
  size_t count = 0;
  if (graph != nullptr && driver.graph_get_nodes(graph, nullptr, &count) == abi::kSuccess) {
    return static_cast<uint32_t>(count);
  }
  return otherwise;
}

// 0 where `stream` does not capture. Throws DriverError where the driver does not tell.
inline uint32_t counted_nodes(const Driver& driver, CUstream stream) {
  int status = 0;
  CUgraph graph = nullptr;
  size_t count = 0;
  PYGRAPH_CHECK(
      driver, stream_get_capture_info(stream, &status, nullptr, &graph, nullptr, nullptr, nullptr));
  if (status != abi::kCaptureStatusActive) return 0;
  PYGRAPH_CHECK(driver, graph_get_nodes(graph, nullptr, &count));
  return static_cast<uint32_t>(count);
}

}  // namespace pygraph::bindings
