#include "replay/held_blocks.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <array>
#include <exception>
#include <limits>

#include "replay/workspace.h"
#include "without_python_lock.h"

namespace pygraph::bindings {
namespace {

constexpr uint64_t kLaunchesPerLook = 16;  // a look copies all statistics of the device
constexpr size_t kDevices = std::numeric_limits<c10::DeviceIndex>::max() + 1;

// By device: how often blocks were dropped.
std::atomic<uint64_t>& generation_of(c10::Device device) {
  static auto* generations = new std::array<std::atomic<uint64_t>, kDevices>;
  return (*generations)[static_cast<uint8_t>(device.index())];
}

uint64_t current_generation(c10::Device device) {
  return generation_of(device) + 1;
}

uint64_t reserved_bytes(c10::Device device) {
  const auto statistics = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return static_cast<uint64_t>(statistics.reserved_bytes[all].current);
}

}  // namespace

void HeldBlocks::drop_all(c10::Device device) {
  const WithoutPythonLock unlocked;
  ++generation_of(device);
  Workspace::free_blocks(device.index());
}

void HeldBlocks::begin(CallStream stream, uint64_t most_reserved) {
  stream_ = stream.handle;
  most_reserved_ = most_reserved;
  launches_ = 0;  // the first launch looks
  generation_ = current_generation(device_);
}

bool HeldBlocks::are_held() const {
  const uint64_t generation = generation_;
  return generation != 0 && generation == current_generation(device_);
}

bool HeldBlocks::are_held(CallStream stream) {
  if (!are_held()) return false;
  if (stream.handle == stream_) return true;
  generation_ = 0;
  return false;
}

void HeldBlocks::look() noexcept {
  if (launches_++ % kLaunchesPerLook != 0) return;
  try {
    if (reserved_bytes(device_) > most_reserved_) drop_all(device_);
  } catch (const std::exception&) {  // the launch is made: nothing may be thrown
    generation_ = 0;
  }
}

}  // namespace pygraph::bindings
