// Which storages a program has told PyTorch's allocator of that another stream uses them
// (Tensor.record_stream). Until that stream is done, the allocator does not give such memory to
// anybody else; a graph that took it over from an argument would not wait.
#pragma once

#include <c10/core/StorageImpl.h>

namespace pygraph::bindings {

// Whether record_stream was called for a tensor on this storage. Costs nothing in programs that
// never call it. Calls of the allocator that do not go by way of the operator are not seen.
bool is_used_by_other_streams(const c10::StorageImpl* storage);

}  // namespace pygraph::bindings
