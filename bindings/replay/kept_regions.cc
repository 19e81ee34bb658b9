#include "replay/kept_regions.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "without_python_lock.h"

namespace pygraph::bindings {
namespace {

// All graphs that keep regions, and the lock for what they keep.
struct Users {
  std::mutex mutex;
  std::unordered_set<KeptRegions*> all;
};

Users& users() {
  static auto* users = new Users;  // graphs may outlive static objects
  return *users;
}

}  // namespace

void KeptRegions::free_all() {
  const WithoutPythonLock unlocked;
  Regions taken;
  const std::lock_guard lock(users().mutex);
  for (KeptRegions* user : users().all) {
    std::ranges::move(std::exchange(user->regions_, {}), std::back_inserter(taken));
  }
}

KeptRegions::~KeptRegions() {
  free();
  const std::lock_guard lock(users().mutex);
  users().all.erase(this);
}

void KeptRegions::begin(uint64_t most_reserved) {
  const std::lock_guard lock(users().mutex);
  users().all.insert(this);
  most_reserved_ = most_reserved;
  launches_ = 0;  // the first launch looks
  keeps_ = true;
}

KeptRegions::Regions KeptRegions::take(CallStream stream) {
  if (!keeps_) return {};
  Regions of_another_stream;
  const std::lock_guard lock(users().mutex);
  if (stream.handle == stream_) return std::exchange(regions_, {});
  of_another_stream.swap(regions_);
  return {};
}

// Nothing is kept of a stream that may be destroyed, because another one may get its handle.
void KeptRegions::keep(CallStream stream, Regions& regions) {
  if (!keeps_ || !stream.is_permanent) return;
  if (launches_++ % kLaunchesPerLook == 0 && is_short_of_memory()) {
    keeps_ = false;
    free_all();  // also of graphs that are not launched any more
    return;
  }
  const std::lock_guard lock(users().mutex);
  if (!keeps_) return;
  stream_ = stream.handle;
  regions_.swap(regions);
}

void KeptRegions::free() noexcept {
  Regions taken;
  const std::lock_guard lock(users().mutex);
  taken.swap(regions_);
}

bool KeptRegions::is_short_of_memory() const noexcept {
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device_.type()));
  if (allocator == nullptr) return true;
  try {
    const auto statistics = allocator->getDeviceStats(device_.index());
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return static_cast<uint64_t>(statistics.reserved_bytes[all].current) > most_reserved_;
  } catch (const std::exception&) {  // the launch is made: nothing may be thrown
    return true;
  }
}

}  // namespace pygraph::bindings
