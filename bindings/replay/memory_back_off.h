#pragma once

#include <cstdint>

namespace pygraph::bindings {

// When a graph whose replays find no memory is to rest, as each try may make PyTorch's allocator
// empty its caches: where that happens three times in a row, or at more than one call in three, for
// 1000 calls, then for four times as many. Not thread-safe.
class MemoryBackOff {
 public:
  // A replay found no memory. Returns whether the graph rests from now on.
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
  // A call that goes uncaptured. Returns whether it was the last one of a rest.
  bool note_uncaptured_call() { return calls_to_rest_ > 0 && --calls_to_rest_ == 0; }

 private:
  static constexpr uint32_t kLimit = 6;
  uint32_t level_ = 0;  // a leaky bucket: two for each time without memory, less one per replay
  uint64_t calls_to_rest_ = 0;
  uint64_t next_rest_ = 1000;
};

}  // namespace pygraph::bindings
