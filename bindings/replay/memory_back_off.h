#pragma once

#include <cstdint>

namespace pygraph::bindings {

// Decides when a graph whose replays find no memory rests, because each try may make PyTorch's
// allocator empty its caches. It rests for 1000 calls after three failures in a row, or failures at
// more than one call in three; each further rest is four times as long. Not thread-safe.
class MemoryBackOff {
 public:
  // Notes a replay that found no memory. Returns whether the graph rests from now on.
  bool note_no_room() {
    level_ += 2;
    if (level_ < kLimit) return false;
    level_ = kLimit - 2;  // after its rest, one more time is enough
    calls_to_rest_ = next_rest_;
    next_rest_ *= 4;
    return true;
  }
  void note_replay() {
    if (level_ > 0) --level_;
  }
  // Notes an uncaptured call. Returns whether it was the last one of a rest.
  bool note_uncaptured_call() { return calls_to_rest_ > 0 && --calls_to_rest_ == 0; }

 private:
  static constexpr uint32_t kLimit = 6;
  uint32_t level_ = 0;  // a leaky bucket: two for each time without memory, less one per replay
  uint64_t calls_to_rest_ = 0;
  uint64_t next_rest_ = 1000;
};

}  // namespace pygraph::bindings
