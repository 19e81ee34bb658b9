// Storages that another stream uses, as the program told PyTorch's allocator
// (Tensor.record_stream). The allocator does not reuse such memory until that stream is done. A
// graph that took it over from an argument would not wait.
#pragma once

#include <c10/core/StorageImpl.h>

namespace pygraph::bindings {

// Whether record_stream was called for a tensor on this storage. Costs nothing in programs that
// never call it. Calls of the allocator that do not go by way of the operator are not seen.
bool is_used_by_other_streams(const c10::StorageImpl* storage);

}  // namespace pygraph::bindings
