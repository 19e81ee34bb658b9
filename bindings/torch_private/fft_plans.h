// Whether cuFFT's plans that a recording used still exist.
//
// A graph's kernels of cuFFT are part of a plan: dropping the plan frees tables that they read and
// may unload the kernels themselves, which the driver does not report. PyTorch keeps plans in one
// cache per device. Plans are dropped when the cache is cleared or resized, by operators that this
// file overrides, and when a plan is added to a full cache.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <shared_mutex>
#include <stdexcept>

namespace pygraph::bindings {

// PyTorch may have dropped plans that a graph uses. Nothing was launched.
class PlansDropped : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class FftPlans {
 public:
  // Notes the plans of a device. To be made before the recording that uses them.
  explicit FftPlans(c10::DeviceIndex device);
  // Throws PlansDropped unless each plan that was noted still exists. None is dropped while the
  // returned lock is held.
  std::shared_lock<std::shared_mutex> check() const;

 private:
  c10::DeviceIndex device_;
  uint64_t generation_;
};

}  // namespace pygraph::bindings
