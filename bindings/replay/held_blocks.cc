#include "replay/held_blocks.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <pthread.h>

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <set>

#include "replay/workspace.h"
#include "without_python_lock.h"

namespace pygraph::bindings {
namespace {

constexpr uint64_t kLaunchesPerLook = 16;  // a look copies all statistics of the device

// All that are held. The lock is never kept while waiting for Python's or another one.
struct Holders {
  std::mutex mutex;
  std::set<HeldBlocks*> all;
  std::atomic<size_t> count = 0;  // read without the lock
};

Holders* g_holders = nullptr;  // never freed: graphs may outlive static objects

// A forked child has others: no graph of its parent's holds anything there.
Holders& holders() {
  [[maybe_unused]] static const int is_made = [] {
    g_holders = new Holders;
    return pthread_atfork(nullptr, nullptr, [] { g_holders = new Holders; });
  }();
  return *g_holders;
}

uint64_t reserved_bytes(c10::Device device) {
  const auto statistics = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return static_cast<uint64_t>(statistics.reserved_bytes[all].current);
}

}  // namespace

void HeldBlocks::drop_all(c10::Device device) {
  const WithoutPythonLock unlocked;
  {
    const std::lock_guard lock(holders().mutex);
    std::erase_if(holders().all, [device](HeldBlocks* holder) {
      if (holder->device_ != device) return false;
      holder->are_held_ = false;
      return true;
    });
    holders().count = holders().all.size();
  }
  Workspace::free_blocks(device.index());
}

void HeldBlocks::begin(CallStream stream, uint64_t bytes, uint64_t most, uint64_t most_reserved) {
  end();  // of an earlier selection
  const std::lock_guard lock(holders().mutex);
  std::map<CUstream, uint64_t> by_stream{{stream.handle, bytes}};  // the graphs of one share
  for (const HeldBlocks* holder : holders().all) {
    if (holder == this || holder->device_ != device_) continue;
    uint64_t& largest = by_stream[holder->stream_];
    largest = std::max(largest, holder->bytes_);
  }
  uint64_t total = 0;
  for (const auto& [handle, largest] : by_stream) total += largest;
  if (total > most) return;
  stream_ = stream.handle;
  bytes_ = bytes;
  most_reserved_ = most_reserved;
  launches_ = 0;  // the first launch looks
  holders().all.insert(this);
  holders().count = holders().all.size();
  are_held_ = true;
}

bool HeldBlocks::are_held(CallStream stream) {
  if (!are_held_) return false;
  if (stream.handle == stream_) return true;
  end();
  return false;
}

void HeldBlocks::end() {
  const std::lock_guard lock(holders().mutex);
  are_held_ = false;
  holders().all.erase(this);
  holders().count = holders().all.size();
}

// Of each device, the least that a holder allows.
std::map<c10::DeviceIndex, uint64_t> HeldBlocks::most_reserved() {
  std::map<c10::DeviceIndex, uint64_t> found;
  const std::lock_guard lock(holders().mutex);
  for (const HeldBlocks* holder : holders().all) {
    const uint64_t most = holder->most_reserved_;
    uint64_t& least = found.try_emplace(holder->device_.index(), most).first->second;
    least = std::min(least, most);
  }
  return found;
}

void HeldBlocks::note_launch() noexcept {
  if (launches_++ % kLaunchesPerLook == 0) look();
}

void HeldBlocks::look() noexcept {
  if (holders().count == 0) return;
  const WithoutPythonLock unlocked;
  try {
    for (const auto& [index, most] : most_reserved()) {
      const c10::Device device(c10::kCUDA, index);
      if (reserved_bytes(device) > most) drop_all(device);
    }
  } catch (const std::exception&) {  // the call goes on: nothing may be thrown
  }
}

}  // namespace pygraph::bindings
