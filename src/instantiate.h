// Makes executables of graphs.
//
// The driver has two forms of executables. The usual one is launched by the host in pieces: a chain
// of kernels is one piece, but each fill (memset node) begins another one, which costs the host 1.6
// us and the GPU 1.5 us. An executable that may also be launched by kernels
// (CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) lies on the device as a whole. The host launches it
// at once, however many fills it has, but each launch costs the host and the GPU 3 us more
// (docs/results/host-time.md). PyGraph launches both forms from the host.
#pragma once

#include "pygraph/handles.h"
#include "pygraph/recording.h"

namespace pygraph {

// Whether the graph has so many fills that the second form is faster. False with
// PYGRAPH_DEVICE_LAUNCH=0.
bool gains_from_device_launch(const Recording& recording);

// Kernels keep the priorities that they were captured with, if one is not the default. Throws
// DriverError. With `for_device_launch`, the driver refuses graphs with nodes that a device cannot
// launch, such as copies from pageable memory of the host.
GraphExec instantiate(const Driver& driver, CUgraph graph, const Recording& recording,
                      bool for_device_launch);

}  // namespace pygraph
