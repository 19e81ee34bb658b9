#include "replay/kept_regions.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "torch_private/free_memory_callback.h"
#include "without_python_lock.h"

namespace pygraph::bindings {
namespace {

bool is_called_back = false;  // written when the extension is loaded

// All objects that keep regions. The allocator calls back with a lock of its own, so nothing may be
// allocated or freed on a device while the mutex is held.
struct Users {
  std::mutex mutex;
  std::unordered_set<KeptRegions*> all;
};

Users& users() {
  static auto* users = new Users;  // graphs may outlive static objects
  return *users;
}

}  // namespace

bool KeptRegions::prepare() {
  is_called_back = torch_cuda::free_where_memory_is_short(&free_on_current_device);
  return is_called_back;
}

KeptRegions::Regions KeptRegions::take_all(std::optional<c10::Device> device) {
  Regions taken;
  const std::lock_guard lock(users().mutex);
  for (KeptRegions* user : users().all) {
    if (device && user->device_ != *device) continue;
    std::ranges::move(std::exchange(user->regions_, {}), std::back_inserter(taken));
  }
  return taken;
}

// Regions of other devices stay, because their allocators have locks of their own.
bool KeptRegions::free_on_current_device() {
  return !take_all(c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice()).empty();
}

void KeptRegions::free_all() {
  const WithoutPythonLock unlocked;
  take_all(std::nullopt).clear();
}

KeptRegions::~KeptRegions() {
  free();
  const std::lock_guard lock(users().mutex);
  users().all.erase(this);
}

void KeptRegions::begin() {
  if (!is_called_back) return;
  const std::lock_guard lock(users().mutex);
  users().all.insert(this);
  keeps_ = true;
}

KeptRegions::Regions KeptRegions::take(CallStream stream) {
  if (!keeps_) return {};
  const std::lock_guard lock(users().mutex);
  if (stream.handle != stream_) return {};
  return std::exchange(regions_, {});
}

void KeptRegions::keep(CallStream stream, Regions& regions) {
  if (!keeps_ || !stream.is_permanent) return;
  const std::lock_guard lock(users().mutex);
  if (!regions_.empty()) return;
  stream_ = stream.handle;
  regions_ = std::exchange(regions, {});
}

void KeptRegions::free() noexcept {
  Regions taken;
  {
    const std::lock_guard lock(users().mutex);
    taken = std::exchange(regions_, {});
  }
}

}  // namespace pygraph::bindings
