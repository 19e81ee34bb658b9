#include "replay/workspace.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

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
  } catch (const c10::Error&) {
    // Another thread captures.
  }
}

[[noreturn]] void throw_no_place() {
  throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "no segment for held blocks alone");
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
    const std::lock_guard lock(workspace->mutex_);
    if (workspace->shares_with_blocks_.empty()) continue;
    workspace->shares_with_blocks_.clear();
    ++workspace->generation_;
    workspace->shrink();
  }
}

void Workspace::grow(uint64_t bytes) {
  const uint64_t before = capacity_;
  free_memory();  // first, so that the old and the new memory never exist together
  try {
    if (shares_with_blocks_.empty()) {
      allocate(bytes);
    } else if (!place(bytes) && !place(bytes)) {  // again: the allocator's cache is empty by then
      throw_no_place();
    }
  } catch (...) {
    try {
      if (before > 0 && shares_with_blocks_.empty()) allocate(before);
    } catch (const c10::OutOfMemoryError&) {
      // The next launch that needs it tries again.
    }
    throw;
  }
}

void Workspace::free_memory() noexcept {
  memory_.clear();
  capacity_ = 0;
  is_defragmented_ = false;
}

void Workspace::allocate(uint64_t bytes) {
  const c10::OptionalDeviceGuard guard(
      c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device_)));
  memory_ = c10::getDeviceAllocator(c10::kCUDA)->allocate(bytes);
  capacity_ = bytes;
}

void Workspace::defragment() {
  const std::lock_guard lock(mutex_);
  if (is_defragmented_ || capacity_ <= kSmallSize) return;
  const uint64_t bytes = capacity_;
  free_memory();
  give_free_memory_back();
  if (!place(bytes)) throw_no_place();
}

// Allocates where it blocks no other memory, if there is such a place. Blocks, which may be much
// memory, take no other: then it allocates nothing, empties the allocator's cache, and returns
// false.
bool Workspace::place(uint64_t bytes) {
  allocate(bytes);
  is_defragmented_ = leave_shared_segment();
  if (is_defragmented_ || shares_with_blocks_.empty()) return true;
  free_memory();
  give_free_memory_back();
  return false;
}

// If the memory is a part of a much larger segment: allocates free pieces of shared segments until
// none is left that would be large enough, so that the next piece gets a new segment. Returns
// false, and the memory stays where it is, if there is no memory for that.
bool Workspace::leave_shared_segment() {
  if (segment_bytes(memory_.get()) <= capacity_ + kLargeBuffer) return true;
  c10::Allocator* allocator = c10::getDeviceAllocator(c10::kCUDA);
  const uint64_t wanted = std::max(capacity_, kMinLargeAlloc);
  std::vector<c10::DataPtr> pieces;
  try {
    while (pieces.size() < std::max(kMostSearched / wanted, kFewestSearched)) {
      c10::DataPtr piece = allocator->allocate(wanted);
      if (segment_bytes(piece.get()) <= wanted + kLargeBuffer) {
        memory_ = std::move(piece);
        return true;
      }
      pieces.push_back(std::move(piece));
    }
  } catch (const c10::Error&) {
    // No memory, or another thread captures.
  }
  return false;
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
  const std::lock_guard lock(mutex_);
  erase_one(shares_, share.bytes);
  if (share.generation == generation_) erase_one(shares_with_blocks_, share.with_blocks);
  shrink();
}

// Frees what nobody needs any more. The stream may not be the current one, or no longer exist: the
// next launch allocates.
void Workspace::shrink() noexcept {
  const auto largest = [](const std::multiset<uint64_t>& shares) {
    return shares.empty() ? 0 : *shares.rbegin();
  };
  if (std::max(largest(shares_), largest(shares_with_blocks_)) < capacity_) free_memory();
}

}  // namespace pygraph::bindings
