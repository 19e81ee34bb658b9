// Owners of driver objects: move-only, destroyed without throwing, tolerant of a driver that is
// shutting down (its answer to a destroy call is ignored).
#pragma once

#include <utility>

#include "pygraph/driver.h"

namespace pygraph {

template <typename Raw, abi::Result (*Driver::*Destroy)(Raw)>
class Handle {
 public:
  Handle() = default;
  Handle(const Driver& driver, Raw raw) : driver_(&driver), raw_(raw) {}
  Handle(Handle&& other) noexcept
      : driver_(other.driver_), raw_(std::exchange(other.raw_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(driver_, other.driver_);
    std::swap(raw_, other.raw_);
    return *this;
  }
  ~Handle() { reset(); }

  void reset() noexcept {
    if (raw_ != nullptr) (driver_->*Destroy)(std::exchange(raw_, nullptr));
  }
  Raw get() const { return raw_; }
  explicit operator bool() const { return raw_ != nullptr; }

 private:
  const Driver* driver_ = nullptr;
  Raw raw_ = nullptr;
};

using Graph = Handle<CUgraph, &Driver::graph_destroy>;
using GraphExec = Handle<CUgraphExec, &Driver::graph_exec_destroy>;
using Stream = Handle<CUstream, &Driver::stream_destroy>;
using Event = Handle<CUevent, &Driver::event_destroy>;
using Module = Handle<CUmodule, &Driver::module_unload>;

inline Stream create_stream(const Driver& driver) {
  CUstream raw = nullptr;
  PYGRAPH_CHECK(driver, stream_create(&raw, /*non-blocking=*/1));
  return {driver, raw};
}

inline Event create_event(const Driver& driver) {
  CUevent raw = nullptr;
  PYGRAPH_CHECK(driver, event_create(&raw, /*no timing=*/2));
  return {driver, raw};
}

// Lets this thread make calls that a capture in progress forbids, until it goes out of scope.
class RelaxedCaptureMode {
 public:
  explicit RelaxedCaptureMode(const Driver& driver) : driver_(driver) {
    driver_.thread_exchange_capture_mode(&mode_);
  }
  ~RelaxedCaptureMode() { driver_.thread_exchange_capture_mode(&mode_); }
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;

 private:
  const Driver& driver_;
  int mode_ = abi::kCaptureModeRelaxed;
};

}  // namespace pygraph
