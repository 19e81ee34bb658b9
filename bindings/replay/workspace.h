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
#include <optional>
#include <set>

#include "own_process.h"
#include "pygraph/driver.h"

namespace pygraph::bindings {

// Thread-safe. Its lock is not held while memory is allocated or freed: PyTorch's allocator may
// then run code of the program (observers of its memory, Python's garbage collection), and that may
// end graphs of the same stream.
//
// All functions but of_stream() may wait for another thread's call of the driver: to be called
// without Python's lock.
class Workspace {
 public:
  // The workspace of a stream, by the driver's number for it. Shared ownership.
  static std::shared_ptr<Workspace> of_stream(int device, uint64_t stream_id);

  explicit Workspace(int device);

  // What a graph needs for its launches, and what it needs if it holds its blocks (held_blocks.h):
  // in all, or 0 if it does not. The latter is gone once the generation is another one.
  struct Share {
    uint64_t bytes = 0;
    uint64_t with_blocks = 0;
    uint64_t generation = 0;  // set by reserve()
  };
  // Add or remove a graph's share. Allocate nothing yet. In a forked child, release() does nothing.
  void reserve(Share& share);
  void release(Share share) noexcept;
  uint64_t generation() const { return generation_; }
  // Removes what is there for blocks from all shares of a device's workspaces, and begins another
  // generation.
  static void free_blocks(int device);

  // Moves the memory, which is to stay, to a place where it does not block other free memory.
  // PyTorch's allocator cuts a request from the smallest free piece that is large enough, and can
  // give a piece back, or use it for a tensor of its size, only when all of it is free. The
  // workspace's stream must be PyTorch's current one. Throws as acquire() does.
  void defragment();

  // The memory for a launch, and the lock that protects it: to be held until the launch is made.
  struct Access {
    uint64_t address;
    std::unique_lock<std::mutex> lock;
  };
  // At least `bytes`. The workspace's stream must be PyTorch's current one. Throws
  // c10::OutOfMemoryError if there is no memory, or no segment that blocks have to themselves; the
  // share of the other graphs is kept if possible.
  Access acquire(uint64_t bytes);

 private:
  struct Memory {
    c10::DataPtr data;
    uint64_t bytes = 0;
    bool is_in_place = false;  // where it blocks no other memory
  };
  void grow(uint64_t bytes);
  void put(Memory memory);
  void free_unneeded();
  Memory take_unneeded() noexcept;
  bool has_blocks();
  Memory allocate(uint64_t bytes) const;
  std::optional<Memory> place(uint64_t bytes);

  const int device_;
  const OwnProcess process_;
  std::mutex mutex_;  // of the following
  std::multiset<uint64_t> shares_;
  std::multiset<uint64_t> shares_with_blocks_;  // of this generation
  std::atomic<uint64_t> generation_ = 0;        // read without the lock
  Memory memory_;
};

}  // namespace pygraph::bindings
