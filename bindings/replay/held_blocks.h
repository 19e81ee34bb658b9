// Whether a graph's launches find their blocks in the workspace.
//
// Blocks are internal memory of 33 MiB and more (docs/decisions/0024). A launch allocates them from
// PyTorch's allocator and frees them, so that others can use them between launches. That takes
// 0.9 us of host time for each. Where memory is plentiful, a graph may hold its blocks instead
// (docs/decisions/0037): the workspace of its stream, which all graphs of the stream share, is then
// larger by them.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>

#include "pygraph/stream_slots.h"

namespace pygraph::bindings {

// Of one graph. Thread-safe.
class HeldBlocks {
 public:
  // Memory of the device has become short: no graph holds blocks any more, and the workspaces that
  // contain some are freed. Releases Python's lock.
  static void drop_all(c10::Device device);

  explicit HeldBlocks(c10::Device device) : device_(device) {}

  // From now on, launches on this stream find the blocks in the workspace, as long as PyTorch's
  // allocator has reserved at most so many bytes of the device.
  void begin(CallStream stream, uint64_t most_reserved);
  // Whether a launch on this stream does. One on another stream ends it: a program that has moved
  // there may stay, and the workspace of that stream has no blocks.
  bool are_held(CallStream stream);
  // Whether launches on the stream of begin() do.
  bool are_held() const;
  // After such a launch, without Python's lock: drops the blocks of all graphs if PyTorch's
  // allocator has reserved more than that. Looks at some of the launches only.
  void look() noexcept;

 private:
  const c10::Device device_;
  std::atomic<uint64_t> generation_ = 0;  // of the device at begin(); 0: none are held
  std::atomic<CUstream> stream_ = nullptr;
  std::atomic<uint64_t> most_reserved_ = 0;
  std::atomic<uint64_t> launches_ = 0;
};

}  // namespace pygraph::bindings
