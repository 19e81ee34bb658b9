// PyTorch's process-wide switches that operators read when they are launched, and that no guard of
// the compiler knows: whether products may use TF32, which attention kernels are allowed, whether
// algorithms must be deterministic. A recording has frozen them, so a graph serves calls that are
// made under the same switches. And one of the thread: whether hooks of saved tensors are active.
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
