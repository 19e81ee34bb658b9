// Constants that a graph copies from memory of the host.
//
// Some operators of a framework compute a small table on the host, from nothing but sizes, in
// pinned memory of their own, and copy it to the device: `_foreach_norm` of PyTorch 2.15, where the
// parts of each tensor begin. The operator gives that memory back, so a graph that is used again
// cannot copy from there. Its copy reads from memory with the same bytes instead, which never
// changes and is kept until the process ends.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <vector>

#include "pygraph/recording.h"

namespace pygraph {

// Pinned memory, one piece for each content. Thread-safe.
class HostConstants {
 public:
  explicit HostConstants(const Driver& driver) : driver_(driver) {}

  // The address of memory with these bytes. Throws DriverError.
  const void* keep(std::span<const std::byte> bytes);
  std::vector<Range> ranges() const;  // all that is kept

 private:
  const Driver& driver_;
  mutable std::mutex mutex_;
  std::deque<std::span<const std::byte>> kept_;
};

// Lets the recording's copies from pinned memory read from `constants`, where `copies_constants`
// says so of the operator that made the copy. To be called while that memory is still what the copy
// would read. Changes images only: returns the nodes (indices) whose parameters in the graph are to
// be set. Throws DriverError.
std::vector<uint32_t> keep_host_constants(
    const Driver& driver, Recording& recording, HostConstants& constants,
    const std::function<bool(const Operator&)>& copies_constants);

}  // namespace pygraph
