#include "workspace.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <map>

namespace pygraph {
namespace {

// Of PyTorch's allocator (c10/core/AllocatorConfig.h): requests of kMinLargeAlloc and more have
// segments of their size, smaller ones share segments of kLargeBuffer, those up to kSmallSize
// others.
constexpr uint64_t kMinLargeAlloc = 10 << 20;
constexpr uint64_t kLargeBuffer = 20 << 20;
constexpr uint64_t kSmallSize = 1 << 20;

// The segment that a piece of the allocator's memory is in; 0 where the driver does not say.
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

}  // namespace

Workspace& Workspace::of_device(int device) {
  static std::mutex mutex;
  static auto* workspaces = new std::map<int, std::unique_ptr<Workspace>>;
  const std::lock_guard lock(mutex);
  auto& workspace = (*workspaces)[device];
  if (!workspace) workspace = std::make_unique<Workspace>(device);
  return *workspace;
}

Workspace::Workspace(int device) : device_(device) {}

void Workspace::resize(uint64_t bytes) {
  if (bytes == capacity_) return;
  const uint64_t before = capacity_;
  free_memory();
  if (bytes == 0) return;
  // What it grows out of would be a hole that it never fits in again.
  if (before > 0 && before < bytes) give_free_memory_back();
  try {
    allocate(bytes);
  } catch (...) {
    if (before > 0 && before < bytes) allocate(before);
    throw;
  }
}

// First, so that the old and the new memory never exist together.
void Workspace::free_memory() {
  // A graph may be dropped while another device is current.
  const c10::OptionalDeviceGuard guard(
      c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device_)));
  PYGRAPH_CHECK(cuda_driver(), context_synchronize());
  memory_.clear();
  capacity_ = 0;
  launched_ = false;
  if (settled_) give_free_memory_back();  // nobody else is served from what is apart
  settled_ = false;
}

void Workspace::allocate(uint64_t bytes) {
  const c10::OptionalDeviceGuard guard(
      c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device_)));
  memory_ = c10::getDeviceAllocator(c10::kCUDA)->allocate(bytes);
  capacity_ = bytes;
}

void Workspace::settle() {
  const std::lock_guard lock(mutex_);
  if (settled_ || capacity_ <= kSmallSize) return;
  const uint64_t bytes = capacity_;
  free_memory();
  give_free_memory_back();
  allocate(bytes);
  if (segment_bytes(memory_.get()) > bytes + kLargeBuffer) allocate_apart(bytes);
  // The last user's work on this piece may be under way, on a stream that launches do not wait for.
  PYGRAPH_CHECK(cuda_driver(), context_synchronize());
  settled_ = true;
}

// In a segment of its own, because a stream is not served from what another one has freed. Where
// there is no room for that, the memory stays where it is.
void Workspace::allocate_apart(uint64_t bytes) {
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(device_));
  if (!apart_) apart_ = c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamFromGlobalPool(device);
  const c10::StreamGuard guard(*apart_);
  try {
    memory_ = c10::getDeviceAllocator(c10::kCUDA)->allocate(std::max(bytes, kMinLargeAlloc));
  } catch (const c10::OutOfMemoryError&) {
  }
}

void Workspace::reserve(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes > capacity_) resize(bytes);
  reservations_.insert(bytes);
}

void Workspace::release(uint64_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  const auto it = reservations_.find(bytes);
  if (it == reservations_.end()) return;
  reservations_.erase(it);
  const uint64_t needed = reservations_.empty() ? 0 : *reservations_.rbegin();
  try {
    if (needed < capacity_) resize(needed);
  } catch (const std::exception&) {
    // A smaller block could not be had or the driver is going away. Graphs that find too little
    // room ask for it again.
    launched_ = false;
  }
}

uint64_t Workspace::enter(const Driver& driver, CUstream stream) {
  if (launched_ && stream != last_stream_) {
    int status = abi::kCaptureStatusNone;
    PYGRAPH_CHECK(driver, stream_is_capturing(last_stream_, &status));
    if (status != abi::kCaptureStatusNone) {
      // Recording an event there would pull this stream into somebody's capture.
      throw WorkspaceBusy("the stream of the last launch is being captured");
    }
    if (!event_) event_ = create_event(driver);
    PYGRAPH_CHECK(driver, event_record(event_.get(), last_stream_));
    PYGRAPH_CHECK(driver, stream_wait_event(stream, event_.get(), 0));
  }
  last_stream_ = stream;
  launched_ = true;
  return reinterpret_cast<uint64_t>(memory_.get());
}

}  // namespace pygraph
