#include "torch_private/fft_plans.h"

#include <ATen/RedispatchFunctions.h>
#include <ATen/ops/_cufft_get_plan_cache_max_size.h>
#include <ATen/ops/_cufft_get_plan_cache_size.h>
#include <torch/library.h>

#include <mutex>

#include "without_python_lock.h"

namespace pygraph::bindings {
namespace {

// Held while plans are dropped, which may wait for the device; to be taken without Python's lock.
std::shared_mutex g_mutex;
uint64_t g_generation = 0;       // times that some may have been, on any device; under the lock
constexpr int64_t kMargin = 16;  // plans that other threads may add meanwhile

constexpr auto kBelow =
    c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);

// BackendSelect is among the keys of every call, and the operators have no kernel there.
void clear_plan_cache(c10::DispatchKeySet keys, at::DeviceIndex device) {
  const WithoutPythonLock unlocked;
  const std::lock_guard lock(g_mutex);
  ++g_generation;
  at::redispatch::_cufft_clear_plan_cache(keys & kBelow, device);
}

void set_plan_cache_max_size(c10::DispatchKeySet keys, at::DeviceIndex device, int64_t size) {
  const WithoutPythonLock unlocked;
  const std::lock_guard lock(g_mutex);
  ++g_generation;
  at::redispatch::_cufft_set_plan_cache_max_size(keys & kBelow, device, size);
}

}  // namespace

FftPlans::FftPlans(c10::DeviceIndex device) : device_(device) {
  const WithoutPythonLock unlocked;
  const std::shared_lock lock(g_mutex);
  generation_ = g_generation;
}

std::shared_lock<std::shared_mutex> FftPlans::check() const {
  std::shared_lock lock(g_mutex);
  // A cache that is not full has never been since it was cleared or resized.
  const bool has_room = at::_cufft_get_plan_cache_size(device_) + kMargin <
                        at::_cufft_get_plan_cache_max_size(device_);
  if (generation_ == g_generation && has_room) return lock;
  throw PlansDropped(
      "plans of cuFFT may have been dropped from PyTorch's cache since it was recorded");
}

}  // namespace pygraph::bindings

TORCH_LIBRARY_IMPL(aten, BackendSelect, m) {
  m.impl("_cufft_clear_plan_cache", &pygraph::bindings::clear_plan_cache);
  m.impl("_cufft_set_plan_cache_max_size", &pygraph::bindings::set_plan_cache_max_size);
}
