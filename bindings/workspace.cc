#include "workspace.h"

#include <c10/core/DeviceGuard.h>

#include <map>

namespace pygraph {

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
  // A graph may be dropped while another device is current.
  const c10::OptionalDeviceGuard guard(
      c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device_)));
  PYGRAPH_CHECK(cuda_driver(), context_synchronize());
  const uint64_t before = capacity_;
  memory_.clear();  // first, so that the old and the new never exist together
  capacity_ = 0;
  launched_ = false;
  if (bytes == 0) return;
  c10::Allocator* allocator = c10::GetAllocator(c10::kCUDA);
  try {
    memory_ = allocator->allocate(bytes);
    capacity_ = bytes;
  } catch (...) {
    if (before > 0 && before < bytes) {
      memory_ = allocator->allocate(before);
      capacity_ = before;
    }
    throw;
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
    // room run uncaptured.
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
