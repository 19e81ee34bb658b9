// Alignment of PyTorch's allocations, which kernels may rely on.
#pragma once

#include <cstdint>

namespace pygraph {

constexpr uint64_t kAllocationAlignment = 512;  // bytes

constexpr uint64_t align_up(uint64_t bytes) {
  return (bytes + kAllocationAlignment - 1) / kAllocationAlignment * kAllocationAlignment;
}

}  // namespace pygraph
