#include "pygraph/stream_slots.h"

#include <algorithm>

namespace pygraph {
namespace {

constexpr size_t kMostSeen = 64;

}  // namespace

std::optional<StreamSlots::Choice> StreamSlots::choose(CallStream stream) {
  const auto is_its_handle = [&](const Slot& slot) {
    return stream.is_permanent && slot.is_taken && slot.stream.is_permanent &&
           slot.stream.handle == stream.handle;
  };
  if (last_ < slots_.size() && is_its_handle(slots_[last_])) {
    slots_[last_].last_use = ++uses_;
    return Choice{last_, slots_[last_].stream_id, false};
  }
  unsigned long long id = 0;
  PYGRAPH_CHECK(driver_, stream_get_id(stream.handle, &id));
  const auto own = std::ranges::find_if(
      slots_, [&](const Slot& slot) { return slot.is_taken && slot.stream_id == id; });
  if (own != slots_.end()) {
    own->stream = stream;
    own->last_use = ++uses_;
    last_ = static_cast<size_t>(own - slots_.begin());
    return Choice{last_, id, false};
  }
  if (slots_.empty()) {
    slots_.emplace_back();
    return assign(0, stream, id);
  }
  watches_ = true;
  const bool is_second_call = was_seen(id);
  if (is_second_call && slots_.size() < most_) {
    slots_.emplace_back();
    return assign(slots_.size() - 1, stream, id);
  }
  std::optional<size_t> oldest;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (oldest && slots_[*oldest].last_use < slots_[i].last_use) continue;
    if (is_complete(slots_[i])) oldest = i;
  }
  if (!oldest) return std::nullopt;
  if (slots_[*oldest].is_taken) was_seen(slots_[*oldest].stream_id);  // its next call is no first
  return assign(*oldest, stream, id);
}

StreamSlots::Choice StreamSlots::assign(size_t slot, CallStream stream, uint64_t stream_id) {
  std::erase(seen_, stream_id);
  slots_[slot].stream = stream;
  slots_[slot].stream_id = stream_id;
  slots_[slot].is_taken = true;
  slots_[slot].last_use = ++uses_;
  last_ = slot;
  return {slot, stream_id, true};
}

// Whether the stream was seen before; it is from here on.
bool StreamSlots::was_seen(uint64_t stream_id) {
  if (std::ranges::find(seen_, stream_id) != seen_.end()) return true;
  if (seen_.size() == kMostSeen) seen_.erase(seen_.begin());
  seen_.push_back(stream_id);
  return false;
}

bool StreamSlots::is_complete(const Slot& slot) const {
  if (!slot.is_taken) return true;
  if (!slot.is_watched) return false;
  const RelaxedCaptureMode relaxed(driver_);
  return driver_.event_query(slot.done.get()) == abi::kSuccess;
}

void StreamSlots::launched(size_t slot, CUstream stream) {
  Slot& used = slots_[slot];
  used.is_watched = false;
  if (!watches_) return;
  // Without the event the slot stays its stream's, which is no error of the launch.
  if (!used.done) {
    CUevent event = nullptr;
    if (driver_.event_create(&event, /*no timing=*/2) != abi::kSuccess) return;
    used.done = Event(driver_, event);
  }
  used.is_watched = driver_.event_record(used.done.get(), stream) == abi::kSuccess;
}

void StreamSlots::drop_last() {
  slots_.pop_back();
  last_ = 0;
}

}  // namespace pygraph
