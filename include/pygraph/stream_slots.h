// Which of a graph's executables serves a launch on which stream.
//
// CUDA runs the launches of one executable one after the other, also those on different streams. A
// program that orders its streams itself does not expect that: where stream A waits for B, a launch
// on B that has to wait for one on A never begins. So each stream has a slot (an executable, and
// whatever else a launch writes to) for itself:
//
//   the stream has a slot           ->  that one; launches on one stream are in order anyway
//   its second call, there is room  ->  a new slot
//   another stream's last launch is ->  that stream's slot changes hands: nothing is under way
//   known to be complete                in it that could be waited for
//   otherwise                       ->  none: the call runs uncaptured
//
// Streams are known by the driver's numbers, which are never used twice; of a stream that the
// program made, the handle is not used after the call that it came with, as it may be destroyed.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "pygraph/handles.h"

namespace pygraph {

// The stream of one call.
struct CallStream {
  CUstream handle = nullptr;
  bool is_permanent = false;  // never destroyed, so the handle alone tells which one it is
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

  // The slot for a launch on the stream, which is its own from here on. Nothing waits.
  std::optional<Choice> choose(CallStream stream);
  // A launch from the slot was enqueued on its stream.
  void launched(size_t slot, CUstream stream);

  size_t size() const { return slots_.size(); }
  // No further slots: there is no memory for them.
  void limit() { most_ = slots_.size(); }
  // The slot that choose() has just added could not be set up.
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
  // Whether to know of the completion of launches, which costs a call of the driver per launch: as
  // soon as a second stream was seen.
  bool watches_ = false;
  std::vector<Slot> slots_;
  std::vector<uint64_t> seen_;  // streams that have no slot, the last ones
  size_t last_ = 0;
  uint64_t uses_ = 0;
};

}  // namespace pygraph
