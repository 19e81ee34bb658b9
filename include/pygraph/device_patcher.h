// Patches an executable graph's kernels on the device: one small kernel before the launch writes
// the new addresses into any number of nodes.
//
//   words:    node, offset, addend | node, offset, addend | ...     in device memory, sorted by
//   slot a change: the slot's new address, and which words are its own    among the kernel's
//   parameters
//
// The kernel calls cudaGraphKernelNodeSetParam, which the driver links: it is kept as PTX, so that
// no toolkit is needed to build it. What that function may change are nodes that were made
// device-updatable before the graph was instantiated; the driver takes several times longer to
// change such nodes from the host. Measurements: docs/selection.md.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pygraph/handles.h"

namespace pygraph {

// Not thread-safe.
class DevicePatcher {
 public:
  struct Word {  // 8 bytes of one kernel's parameters: the address of a slot, plus the addend
    void* node = nullptr;  // device_updatable.node of a kernel node of an executable graph
    uint64_t offset = 0;   // in bytes, as cuFuncGetParamInfo counts
    uint64_t addend = 0;
  };
  struct Change {
    uint64_t address = 0;  // the new one
    uint32_t begin = 0;    // of the words [begin, end)
    uint32_t end = 0;
  };

  // Compiles the kernel (the driver does, 70 ms; it keeps the result on disk) and copies the words
  // to the device. Throws DriverError.
  DevicePatcher(const Driver& driver, std::span<const Word> words);
  // Waits for the device, whichever is current.
  ~DevicePatcher();
  DevicePatcher(const DevicePatcher&) = delete;
  DevicePatcher& operator=(const DevicePatcher&) = delete;

  // Enqueues the changes on `stream`, about 4 us per 255 of them. The executable must have been
  // uploaded or launched, and must not run before they are done: enqueue its launch on the same
  // stream, after what launched it last. Throws DriverError.
  void patch(CUstream stream, std::span<const Change> changes);

  // Waits for `stream`. Throws DriverError if the device has refused a change so far. From then on
  // a refused change stops the kernel, and with it the CUDA context, rather than let a graph run at
  // old addresses; so the first changes should be to all words.
  void confirm(CUstream stream);

 private:
  const Driver& driver_;
  CUcontext context_ = nullptr;
  Module module_;
  CUfunction kernel_ = nullptr;
  abi::DevicePointer words_ = 0;
  abi::DevicePointer status_ = 0;  // the last refusal, a cudaError_t
  bool is_confirmed_ = false;
};

}  // namespace pygraph
