// The internal memory that a graph's last launch allocated, kept for its next one.
//
// Each launch allocates its regions from PyTorch's allocator and frees them, so that others can use
// them between launches. That takes 0.8 us for each region. Kept regions stay allocated after the
// launch. Where the allocator finds no free piece for a request, it calls back before it takes new
// memory from the device, and all regions that are kept on the device are freed. So they take no
// memory that others need; but they count as allocated, and torch.cuda.empty_cache() does not
// release them.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <atomic>
#include <optional>
#include <vector>

#include "pygraph/stream_slots.h"

namespace pygraph::bindings {

// Of one graph. Thread-safe; no function waits for another thread, except where memory is freed.
class KeptRegions {
 public:
  using Regions = std::vector<c10::DataPtr>;

  // Lets the allocator call back. To be called when the extension is loaded
  // (torch_private/free_memory_callback.h). Returns whether this PyTorch can.
  static bool prepare();
  // Frees what any graph keeps.
  static void free_all();

  explicit KeptRegions(c10::Device device) : device_(device) {}
  ~KeptRegions();
  KeptRegions(const KeptRegions&) = delete;
  KeptRegions& operator=(const KeptRegions&) = delete;

  // Keeps regions from now on. Has no effect if the allocator does not call back.
  void begin();
  // The regions of the last launch on the stream; empty if none are kept.
  Regions take(CallStream stream);
  // Takes over the regions of a launch on the stream, and leaves `regions` empty. Leaves them as
  // they are if none are to be kept, if those of another stream are, or if the stream may be
  // destroyed.
  void keep(CallStream stream, Regions& regions);
  void free() noexcept;

 private:
  static Regions take_all(std::optional<c10::Device> device);
  static bool free_on_current_device();

  const c10::Device device_;
  std::atomic<bool> keeps_ = false;
  CUstream stream_ = nullptr;
  Regions regions_;
};

}  // namespace pygraph::bindings
