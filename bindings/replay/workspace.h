// The workspace: memory for internal allocations, shared by all graphs on one stream.
//
// Nothing in it outlives a launch, so its size is the maximum over the graphs, not their sum.
// Launches that share it must not overlap, and launches on one stream do not. So each stream has a
// workspace of its own, and no launch waits for another stream. The memory is allocated by
// PyTorch's allocator, like a tensor of that stream, and freed in the stream's order: nothing waits
// for the GPU.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "pygraph/driver.h"

namespace pygraph::bindings {

// All functions but of_stream() may wait for another thread's call of the driver: to be called
// without Python's lock.
class Workspace {
 public:
  // The workspace of a stream, by the driver's number for it. Shared ownership.
  static std::shared_ptr<Workspace> of_stream(int device, uint64_t stream_id);

  explicit Workspace(int device);

  // Adds or removes a graph that needs `bytes` for its launches. Allocates nothing yet.
  // Thread-safe.
  void reserve(uint64_t bytes);
  void release(uint64_t bytes) noexcept;

  // Moves the memory, which is to stay, to a place where it does not block other free memory.
  // PyTorch's allocator cuts a request from the smallest free piece that is large enough, and can
  // give a piece back, or use it for a tensor of its size, only when all of it is free. The
  // workspace's stream must be PyTorch's current one. Throws as acquire() does. Thread-safe.
  void defragment();

  // Bytes of blocks (held_blocks.h) in the other workspaces of the device.
  uint64_t blocks_elsewhere() const;
  // Frees the workspaces of a device that contain blocks. The next launches allocate what they
  // need.
  static void free_blocks(int device);

  // For the launch of a graph: hold the lock, then call acquire(), bind, launch. The lock protects
  // the memory until then.
  std::mutex& mutex() { return mutex_; }
  // The address of at least `bytes`, of which `blocks` are for blocks. The workspace's stream must
  // be PyTorch's current one. Throws c10::OutOfMemoryError if there is no memory; the share of the
  // other graphs is kept if possible.
  uint64_t acquire(uint64_t bytes, uint64_t blocks) {
    if (capacity_ < bytes) grow(bytes);
    if (block_bytes_ < blocks) block_bytes_ = blocks;
    return reinterpret_cast<uint64_t>(memory_.get());
  }

 private:
  static std::vector<std::shared_ptr<Workspace>> all_of(int device);

  void grow(uint64_t bytes);
  void free_memory() noexcept;
  void allocate(uint64_t bytes);
  void allocate_in_own_segment(uint64_t bytes);

  const int device_;
  std::mutex mutex_;
  std::multiset<uint64_t> reservations_;
  c10::DataPtr memory_;
  uint64_t capacity_ = 0;
  std::atomic<uint64_t> block_bytes_ = 0;  // of it, for blocks
  bool is_defragmented_ = false;
};

}  // namespace pygraph::bindings
