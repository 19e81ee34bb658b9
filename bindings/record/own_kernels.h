// Whether an operator of PyTorch's still runs PyTorch's own kernels. A library may have replaced
// them (TORCH_LIBRARY_IMPL, torch.library); then nothing is known of what they do.
#pragma once

#include <ATen/core/operator_name.h>

namespace pygraph::bindings {

// Whether all kernels that the operator runs for plain tensors on a GPU come from PyTorch's own
// sources, as far as the dispatcher tells.
bool has_own_kernels(const c10::OperatorName& name);

}  // namespace pygraph::bindings
