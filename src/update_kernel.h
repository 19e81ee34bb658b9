// New parameters for a kernel node, in a graph or in an executable graph.
//
// The driver refuses parameters whose dynamic shared memory exceeds the limit that the function has
// at that time. A library may lower the limit again after the launch that was captured: cuDNN's
// batch norm sets it before each launch to what that launch needs (seen with cuDNN 9 on an H200,
// where the graph of ResNet-18 has launches of one function with 2 to 64 KiB). Then the limit is
// raised to the most that the device allows, and the parameters are set again. That does no harm to
// other users of the function, because the limit is only raised.
#pragma once

#include "pygraph/driver.h"
#include "pygraph/recording.h"

namespace pygraph {

// Throws DriverError, which names the kernel.
void set_kernel_params(const Driver& driver, const Node& node, const abi::KernelNodeParams& params);
void set_kernel_params(const Driver& driver, CUgraphExec exec, const Node& node,
                       const abi::KernelNodeParams& params);

}  // namespace pygraph
