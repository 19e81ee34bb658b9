// Recording without PyTorch: from code that enqueues work on a stream to an executable graph.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "pygraph/executable.h"

namespace pygraph {

// Size and alignment of one buffer.
struct Buffer {
  uint64_t size = 0;         // bytes
  uint64_t alignment = 256;  // of every address that will be bound to it; at most 512
};

// Enqueues the computation on `stream`, using addresses[i] for buffer i.
using Issue = std::function<void(CUstream stream, std::span<const abi::DevicePointer> addresses)>;

// Records `issue` twice at different stand-in addresses, links the recordings and returns the
// executable graph, whose slots are the buffers in their order, then the (empty) workspace: bind
// with one address per buffer and a zero. `issue` runs twice; nothing it enqueues executes. It must
// enqueue the same work each time, keep to the given stream, allocate nothing, and not synchronize.
//
// Load and run the kernels once before: lazy loading may be refused while recording. A CUDA context
// of `device` must be current. Throws NotRelocatable or DriverError; exceptions of `issue` pass
// through. In each case the stream is usable again.
std::unique_ptr<ExecutableGraph> record(const Driver& driver, int device,
                                        std::span<const Buffer> buffers, const Issue& issue);

}  // namespace pygraph
