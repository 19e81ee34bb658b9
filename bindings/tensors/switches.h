// PyTorch's process-wide switches that operators read when they are launched, and that the compiler
// does not guard: whether products may use TF32, which attention kernels are allowed, whether
// algorithms must be deterministic. A recording freezes them, so a graph serves only calls
// with equal switches. One switch belongs to the thread: whether hooks of saved tensors are active.
#pragma once

#include <cstdint>

namespace pygraph::bindings {

struct Switches {
  uint64_t flags = 0;    // everything that takes a few bits
  uint64_t numbers = 0;  // cuDNN's limit of benchmarks, and multiprocessors that are set aside
  bool operator==(const Switches&) const = default;
};

// As of now, in this thread. Takes some tens of nanoseconds; never raises or warns.
Switches current_switches();

}  // namespace pygraph::bindings
