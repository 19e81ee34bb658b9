// Assigns a graph's executables to streams.
//
// CUDA runs the launches of one executable one after the other, also those on different streams. A
// program that orders its streams itself does not expect that, and may hang: if stream A waits for
// B, a launch on B that has to wait for one on A never begins. So each stream has a slot of its
// own: an executable, and the other memory that a launch writes to.
//
//   the stream has a slot           ->  that one; launches on one stream are in order anyway
//   its second call, there is room  ->  a new slot
//   another stream's last launch is ->  that stream's slot, which has no work left to wait for
//   known to be complete
//   otherwise                       ->  none: the call runs uncaptured
//
// Streams are identified by the driver's numbers, which are never used twice. The handle of a
// stream that the program created is used only during the call, because the program may destroy the
// stream.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "pygraph/handles.h"

namespace pygraph {

// The stream of one call.
struct CallStream {
  CUstream handle = nullptr;
  bool is_permanent = false;  // never destroyed, so the handle identifies it
};

// Not thread-safe: hold one lock from choose() to launched().
class StreamSlots {
 public:
  struct Choice {
    size_t slot = 0;
    uint64_t stream_id = 0;
    bool has_moved = false;  // the slot is new, or was another stream's
  };

  // At most `most` slots.
  StreamSlots(const Driver& driver, size_t most) : driver_(driver), most_(most) {}

  // The slot for a launch on the stream, assigned to it from here on. Does not wait.
  std::optional<Choice> choose(CallStream stream);
  // A launch from the slot was enqueued on its stream.
  void launched(size_t slot, CUstream stream);

  size_t size() const { return slots_.size(); }
  // Allows no further slots, because there is no memory for them.
  void limit() { most_ = slots_.size(); }
  // Removes the slot that choose() has just added and that could not be set up.
  void drop_last();

 private:
  struct Slot {
    CallStream stream;
    uint64_t stream_id = 0;
    bool is_taken = false;
    bool is_watched = false;  // `done` is recorded after the last launch
    Event done;
    uint64_t last_use = 0;
  };
  bool is_complete(const Slot& slot) const;
  bool was_seen(uint64_t stream_id);
  Choice assign(size_t slot, CallStream stream, uint64_t stream_id);

  const Driver& driver_;
  size_t most_;
  // Whether to record an event after each launch, which costs a call of the driver. True once a
  // second stream was seen.
  bool watches_ = false;
  std::vector<Slot> slots_;
  std::vector<uint64_t> seen_;  // the most recent streams without a slot
  size_t last_ = 0;
  uint64_t uses_ = 0;
};

}  // namespace pygraph
