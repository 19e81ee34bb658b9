#include "replay/workspace.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <exception>
#include <map>
#include <utility>
#include <vector>

#include "pygraph/handles.h"

namespace pygraph::bindings {
namespace {

// Of PyTorch's allocator (c10/core/AllocatorConfig.h): requests of kMinLargeAlloc and more have
// segments of their size, smaller ones share segments of kLargeBuffer, those up to kSmallSize
// others.
constexpr uint64_t kMinLargeAlloc = 10 << 20;
constexpr uint64_t kLargeBuffer = 20 << 20;
constexpr uint64_t kSmallSize = 1 << 20;

// What is allocated for a moment in search of a segment of its own: bytes, and pieces if these are
// more.
constexpr uint64_t kMostSearched = 2ULL << 30;
constexpr uint64_t kFewestSearched = 4;

// The segment that a piece of the allocator's memory is in; 0 if the driver does not say.
uint64_t segment_bytes(const void* memory) {
  abi::DevicePointer base = 0;
  size_t size = 0;
  const auto address = reinterpret_cast<abi::DevicePointer>(memory);
  const int status = cuda_driver().memory_get_address_range(&base, &size, address);
  return status == abi::kSuccess ? size : 0;
}

void give_free_memory_back() {
  try {
    c10::getDeviceAllocator(c10::kCUDA)->emptyCache();
  } catch (const std::exception&) {
    // PyTorch's, or of an observer: the memory stays in the cache.
  }
}

[[noreturn]] void throw_no_place() {
  throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "no segment for held blocks alone");
}

// If the memory is a part of a much larger segment: allocates free pieces of shared segments until
// none is left that would be large enough, so that the next piece gets a new segment. Returns
// false, and the memory stays where it is, if there is no memory for that.
bool leave_shared_segment(c10::DataPtr& memory, uint64_t bytes) {
  if (segment_bytes(memory.get()) <= bytes + kLargeBuffer) return true;
  c10::Allocator* allocator = c10::getDeviceAllocator(c10::kCUDA);
  const uint64_t wanted = std::max(bytes, kMinLargeAlloc);
  std::vector<c10::DataPtr> pieces;
  try {
    while (pieces.size() < std::max(kMostSearched / wanted, kFewestSearched)) {
      c10::DataPtr piece = allocator->allocate(wanted);
      if (segment_bytes(piece.get()) <= wanted + kLargeBuffer) {
        memory = std::move(piece);
        return true;
      }
      pieces.push_back(std::move(piece));
    }
  } catch (const std::exception&) {
    // There is no memory, or an observer that was told so has raised.
  }
  return false;
}

// All workspaces, by the device and the driver's number of the stream.
struct Registry {
  std::mutex mutex;
  std::map<std::pair<int, uint64_t>, std::weak_ptr<Workspace>> workspaces;
};

Registry& registry() {
  static auto* registry = new Registry;  // graphs may outlive static objects
  return *registry;
}

}  // namespace

std::shared_ptr<Workspace> Workspace::of_stream(int device, uint64_t stream_id) {
  const std::lock_guard lock(registry().mutex);
  auto& workspaces = registry().workspaces;
  std::erase_if(workspaces, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<Workspace>& known = workspaces[{device, stream_id}];
  std::shared_ptr<Workspace> workspace = known.lock();
  if (workspace == nullptr) known = workspace = std::make_shared<Workspace>(device);
  return workspace;
}

Workspace::Workspace(int device) : device_(device) {}

void Workspace::free_blocks(int device) {
  std::vector<std::shared_ptr<Workspace>> found;
  {
    const std::lock_guard lock(registry().mutex);
    for (const auto& [key, workspace] : registry().workspaces) {
      if (key.first == device) found.push_back(workspace.lock());
    }
  }
  for (const auto& workspace : found) {
    if (workspace == nullptr) continue;
    Memory unneeded;  // freed without the lock
    const std::lock_guard lock(workspace->mutex_);
    if (workspace->shares_with_blocks_.empty()) continue;
    workspace->shares_with_blocks_.clear();
    ++workspace->generation_;
    unneeded = workspace->take_unneeded();
  }
}

Workspace::Access Workspace::acquire(uint64_t bytes) {
  std::unique_lock lock(mutex_);
  while (memory_.bytes < bytes) {  // again, if another thread has dropped blocks meanwhile
    lock.unlock();
    grow(bytes);
    lock.lock();
  }
  return {reinterpret_cast<uint64_t>(memory_.data.get()), std::move(lock)};
}

void Workspace::grow(uint64_t bytes) {
  const RelaxedCaptureMode relaxed(cuda_driver());  // another thread may capture
  uint64_t before = 0;
  {
    Memory old;  // freed first, so that the old and the new memory never exist together
    const std::lock_guard lock(mutex_);
    if (memory_.bytes >= bytes) return;
    old = std::exchange(memory_, {});
    before = old.bytes;
  }
  try {
    std::optional<Memory> placed;
    if (!has_blocks()) {
      placed = allocate(bytes);
    } else if (!(placed = place(bytes)) && !(placed = place(bytes))) {  // with an empty cache
      throw_no_place();
    }
    put(std::move(*placed));
  } catch (...) {
    try {
      if (before > 0 && !has_blocks()) put(allocate(before));
      free_unneeded();
    } catch (const c10::OutOfMemoryError&) {
      // The next launch that needs it tries again.
    }
    throw;
  }
}

// Unless another thread has put as much there. Frees the smaller one.
void Workspace::put(Memory memory) {
  {
    const std::lock_guard lock(mutex_);
    if (memory.bytes > memory_.bytes) std::swap(memory, memory_);
  }
  memory.data.clear();  // without the lock
}

bool Workspace::has_blocks() {
  const std::lock_guard lock(mutex_);
  return !shares_with_blocks_.empty();
}

Workspace::Memory Workspace::allocate(uint64_t bytes) const {
  const c10::OptionalDeviceGuard guard(
      c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device_)));
  try {
    return {c10::getDeviceAllocator(c10::kCUDA)->allocate(bytes), bytes};
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {  // of an observer that was told that there is no memory
    throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, error.what());
  }
}

void Workspace::defragment() {
  const RelaxedCaptureMode relaxed(cuda_driver());  // another thread may capture
  uint64_t bytes = 0;
  {
    Memory old;  // freed without the lock
    const std::lock_guard lock(mutex_);
    if (memory_.is_in_place || memory_.bytes <= kSmallSize) return;
    bytes = memory_.bytes;
    old = std::exchange(memory_, {});
  }
  give_free_memory_back();
  std::optional<Memory> placed = place(bytes);
  if (!placed) throw_no_place();
  put(std::move(*placed));
  free_unneeded();
}

// Graphs may have ended while the memory was replaced without the lock.
void Workspace::free_unneeded() {
  Memory unneeded;  // freed without the lock
  const std::lock_guard lock(mutex_);
  unneeded = take_unneeded();
}

// Allocates where it blocks no other memory, if there is such a place. Blocks, which may be much
// memory, take no other: then it allocates nothing, and empties the allocator's cache.
std::optional<Workspace::Memory> Workspace::place(uint64_t bytes) {
  {
    Memory memory = allocate(bytes);
    memory.is_in_place = leave_shared_segment(memory.data, bytes);
    if (memory.is_in_place || !has_blocks()) return memory;
  }
  give_free_memory_back();
  return std::nullopt;
}

void Workspace::reserve(Share& share) {
  const std::lock_guard lock(mutex_);
  share.generation = generation_;
  if (share.bytes > 0) shares_.insert(share.bytes);
  if (share.with_blocks > 0) shares_with_blocks_.insert(share.with_blocks);
}

void Workspace::release(Share share) noexcept {
  const auto erase_one = [](std::multiset<uint64_t>& shares, uint64_t bytes) {
    const auto it = shares.find(bytes);
    if (it != shares.end()) shares.erase(it);
  };
  if (!process_.is_here()) return;
  Memory unneeded;  // freed without the lock
  const std::lock_guard lock(mutex_);
  erase_one(shares_, share.bytes);
  if (share.generation == generation_) erase_one(shares_with_blocks_, share.with_blocks);
  unneeded = take_unneeded();
}

// What nobody needs any more; hold the lock. The stream may not be the current one, or no longer
// exist: the next launch allocates.
Workspace::Memory Workspace::take_unneeded() noexcept {
  const auto largest = [](const std::multiset<uint64_t>& shares) {
    return shares.empty() ? 0 : *shares.rbegin();
  };
  const uint64_t needed = std::max(largest(shares_), largest(shares_with_blocks_));
  return needed < memory_.bytes ? std::exchange(memory_, {}) : Memory{};
}

}  // namespace pygraph::bindings
