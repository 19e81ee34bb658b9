// The internal memory that a graph's last launch allocated, kept for its next one.
//
// Each launch allocates its regions from PyTorch's allocator and frees them, so that others can use
// them between launches. That takes 0.9 us for each region. Where memory is plentiful, a graph may
// keep a few of them instead, as it keeps its workspace. They count as allocated meanwhile.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "pygraph/stream_slots.h"

namespace pygraph::bindings {

// Of one graph. Thread-safe. Memory is freed without holding the lock of what is kept.
class KeptRegions {
 public:
  using Regions = std::vector<c10::DataPtr>;

  // Frees what all graphs keep; their next launches allocate again. Releases Python's lock.
  static void free_all();

  explicit KeptRegions(c10::Device device) : device_(device) {}
  ~KeptRegions();
  KeptRegions(const KeptRegions&) = delete;
  KeptRegions& operator=(const KeptRegions&) = delete;

  // Keeps regions from now on, as long as PyTorch's allocator has reserved at most so many bytes of
  // the device: once a launch sees that it has more, this graph keeps nothing any more, and what
  // others keep is freed.
  void begin(uint64_t most_reserved);
  // The regions of the last launch, if that was on this stream. Else none, and those of the other
  // stream are freed: a program that has moved to another stream stays there.
  Regions take(CallStream stream);
  // Takes over the regions of a launch, if any are kept. What is left in `regions` is to be freed.
  void keep(CallStream stream, Regions& regions);
  void free() noexcept;

 private:
  // How many launches it takes to see that memory has become short.
  static constexpr uint64_t kLaunchesPerLook = 16;

  bool is_short_of_memory() const noexcept;

  const c10::Device device_;
  std::atomic<bool> keeps_ = false;
  std::atomic<uint64_t> launches_ = 0;
  std::atomic<uint64_t> most_reserved_ = 0;
  CUstream stream_ = nullptr;
  Regions regions_;
};

}  // namespace pygraph::bindings
