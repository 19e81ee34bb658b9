// The memory that all graphs of a device share for what lives only inside a launch.
//
// Nothing in it outlives a launch, so its size is the maximum over the graphs, not their sum. Two
// launches must not overlap: launches on one stream do not, and a launch on another stream than the
// last one first waits for it by an event.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>

#include "pygraph/handles.h"

namespace pygraph {

// The last launch was on a stream that is being captured now, so nothing can wait for it. The call
// runs uncaptured; later ones may replay again.
class WorkspaceBusy : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Workspace {
 public:
  // The workspace of the device; one per process and device, made on first use, never destroyed
  // (the driver may be gone by the time static objects are).
  static Workspace& of_device(int device);

  explicit Workspace(int device);

  // Makes room for a graph that needs `bytes`, or gives that room back. Waits for the device where
  // the memory moves. reserve() throws c10::OutOfMemoryError where the memory cannot be had; the
  // room of the other graphs is kept if possible. Thread-safe.
  void reserve(uint64_t bytes);
  void release(uint64_t bytes) noexcept;

  // Moves the memory, which is to stay, to where it does not hold what else is free. PyTorch's
  // allocator cuts a request from the smallest free piece that is large enough, and can give a
  // piece back, or use it for a tensor of its size, only when all of it is free. Throws as
  // reserve() does. Thread-safe.
  void settle();

  // Less than was reserved where memory that moved could not be had again. Thread-safe.
  uint64_t capacity() const { return capacity_; }

  // For the launch of a graph: hold the lock, then call enter(), bind, launch.
  std::mutex& mutex() { return mutex_; }
  // Orders the launch on `stream` after the last one and returns the workspace's address. Throws
  // WorkspaceBusy or DriverError.
  uint64_t enter(const Driver& driver, CUstream stream);

 private:
  void resize(uint64_t bytes);
  void free_memory();
  void allocate(uint64_t bytes);
  void allocate_apart(uint64_t bytes);

  const int device_;
  std::mutex mutex_;
  std::multiset<uint64_t> reservations_;
  c10::DataPtr memory_;
  std::atomic<uint64_t> capacity_ = 0;
  bool settled_ = false;
  std::optional<c10::Stream> apart_;  // never runs anything
  CUstream last_stream_ = nullptr;
  bool launched_ = false;
  Event event_;
};

}  // namespace pygraph
