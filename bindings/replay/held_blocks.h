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
#include <map>

#include "pygraph/stream_slots.h"

namespace pygraph::bindings {

// Of one graph. Thread-safe.
class HeldBlocks {
 public:
  // Memory of the device has become short: its graphs hold no blocks any more, and the workspaces
  // that contain some are freed. Releases Python's lock.
  static void drop_all(c10::Device device);
  // Drops the blocks of each device of which PyTorch's allocator has reserved more than one of its
  // graphs allows. Before calls that are not replayed, which may need more memory than a launch,
  // and every few launches. Costs nothing if no graph holds blocks. With or without Python's lock.
  static void look() noexcept;

  explicit HeldBlocks(c10::Device device) : device_(device) {}
  ~HeldBlocks() { end(); }
  HeldBlocks(const HeldBlocks&) = delete;
  HeldBlocks& operator=(const HeldBlocks&) = delete;

  // From now on, launches on this stream find the blocks, so many bytes, in the workspace: if all
  // streams of the device then hold at most `most`, and as long as PyTorch's allocator has reserved
  // at most `most_reserved` of it.
  void begin(CallStream stream, uint64_t bytes, uint64_t most, uint64_t most_reserved);
  void end();
  bool are_held() const { return are_held_; }
  // Whether a launch on this stream finds them. One on another stream ends it: a program that has
  // moved there may stay, and the workspace of that stream has no blocks.
  bool are_held(CallStream stream);
  // After a launch that has found them. Looks at some of the launches only.
  void note_launch() noexcept;

 private:
  static std::map<c10::DeviceIndex, uint64_t> most_reserved();

  const c10::Device device_;
  std::atomic<bool> are_held_ = false;
  std::atomic<CUstream> stream_ = nullptr;
  std::atomic<uint64_t> most_reserved_ = 0;
  std::atomic<uint64_t> launches_ = 0;
  uint64_t bytes_ = 0;  // protected by the lock of all holders
};

}  // namespace pygraph::bindings
