// The CUDA driver as a table of functions, filled at run time.
//
// Why a table: the engine must load on machines without a toolkit or a GPU, and the tests pass the
// table of a simulated driver. Every member keeps the driver's own calling convention and returns a
// CUresult. Versions are pinned per function because the plain names change their ABI from release
// to release (cuda.h maps them to _v2, _v3, ...).
#pragma once

#include <stdexcept>
#include <string>

#include "pygraph/cuda_abi.h"

namespace pygraph {

// X(member, symbol, ABI version to ask for, parameters...)
// clang-format off
#define PYGRAPH_DRIVER_FUNCTIONS(X)                                                                \
  X(driver_get_version, "cuDriverGetVersion", 2020, int*)                                         \
  X(init, "cuInit", 2000, unsigned)                                                               \
  X(get_error_name, "cuGetErrorName", 6000, abi::Result, const char**)                            \
  X(device_get, "cuDeviceGet", 2000, int*, int)                                                   \
  X(device_get_attribute, "cuDeviceGetAttribute", 2000, int*, int, int)                           \
  X(primary_context_retain, "cuDevicePrimaryCtxRetain", 7000, CUcontext*, int)                    \
  X(context_set_current, "cuCtxSetCurrent", 4000, CUcontext)                                      \
  X(context_get_current, "cuCtxGetCurrent", 4000, CUcontext*)                                     \
  X(context_get_device, "cuCtxGetDevice", 2000, int*)                                             \
  X(context_synchronize, "cuCtxSynchronize", 2000)                                                \
  X(stream_create, "cuStreamCreate", 2000, CUstream*, unsigned)                                   \
  X(stream_destroy, "cuStreamDestroy", 4000, CUstream)                                            \
  X(stream_synchronize, "cuStreamSynchronize", 2000, CUstream)                                    \
  X(stream_wait_event, "cuStreamWaitEvent", 3020, CUstream, CUevent, unsigned)                    \
  X(stream_get_id, "cuStreamGetId", 12000, CUstream, unsigned long long*)                          \
  X(stream_is_capturing, "cuStreamIsCapturing", 10000, CUstream, int*)                            \
  X(stream_begin_capture, "cuStreamBeginCapture", 10010, CUstream, int)                           \
  X(stream_end_capture, "cuStreamEndCapture", 10000, CUstream, CUgraph*)                          \
  X(stream_get_capture_info, "cuStreamGetCaptureInfo", 12030, CUstream, int*, uint64_t*, CUgraph*, \
    const CUgraphNode**, const abi::EdgeData**, size_t*)                                          \
  X(thread_exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", 10010, int*)               \
  X(event_create, "cuEventCreate", 2000, CUevent*, unsigned)                                      \
  X(event_record, "cuEventRecord", 2000, CUevent, CUstream)                                       \
  X(event_query, "cuEventQuery", 2000, CUevent)                                                   \
  X(event_destroy, "cuEventDestroy", 4000, CUevent)                                               \
  X(graph_create, "cuGraphCreate", 10000, CUgraph*, unsigned)                                     \
  X(graph_add_child, "cuGraphAddChildGraphNode", 10000, CUgraphNode*, CUgraph,                    \
    const CUgraphNode*, size_t, CUgraph)                                                          \
  X(graph_get_nodes, "cuGraphGetNodes", 10000, CUgraph, CUgraphNode*, size_t*)                    \
  X(graph_get_edges, "cuGraphGetEdges", 12030, CUgraph, CUgraphNode*, CUgraphNode*,               \
    abi::EdgeData*, size_t*)                                                                      \
  X(graph_add_dependencies, "cuGraphAddDependencies", 12030, CUgraph, const CUgraphNode*,         \
    const CUgraphNode*, const abi::EdgeData*, size_t)                                             \
  X(graph_remove_dependencies, "cuGraphRemoveDependencies", 12030, CUgraph, const CUgraphNode*,   \
    const CUgraphNode*, const abi::EdgeData*, size_t)                                             \
  X(graph_node_get_type, "cuGraphNodeGetType", 10000, CUgraphNode, int*)                          \
  X(graph_kernel_get_params, "cuGraphKernelNodeGetParams", 12000, CUgraphNode,                    \
    abi::KernelNodeParams*)                                                                       \
  X(graph_kernel_set_params, "cuGraphKernelNodeSetParams", 12000, CUgraphNode,                    \
    const abi::KernelNodeParams*)                                                                 \
  X(graph_kernel_get_attribute, "cuGraphKernelNodeGetAttribute", 11000, CUgraphNode, int,         \
    abi::LaunchAttributeValue*)                                                                   \
  X(graph_kernel_set_attribute, "cuGraphKernelNodeSetAttribute", 11000, CUgraphNode, int,         \
    abi::LaunchAttributeValue*)                                                                   \
  X(graph_memcpy_get_params, "cuGraphMemcpyNodeGetParams", 10000, CUgraphNode, abi::Memcpy3D*)    \
  X(graph_memcpy_set_params, "cuGraphMemcpyNodeSetParams", 10000, CUgraphNode,                    \
    const abi::Memcpy3D*)                                                                         \
  X(graph_memset_get_params, "cuGraphMemsetNodeGetParams", 10000, CUgraphNode,                    \
    abi::MemsetNodeParams*)                                                                       \
  X(graph_memset_set_params, "cuGraphMemsetNodeSetParams", 10000, CUgraphNode,                    \
    const abi::MemsetNodeParams*)                                                                 \
  X(graph_child_get_graph, "cuGraphChildGraphNodeGetGraph", 10000, CUgraphNode, CUgraph*)         \
  X(graph_clone, "cuGraphClone", 10000, CUgraph*, CUgraph)                                        \
  X(graph_find_in_clone, "cuGraphNodeFindInClone", 10000, CUgraphNode*, CUgraphNode, CUgraph)     \
  X(graph_destroy, "cuGraphDestroy", 10000, CUgraph)                                              \
  X(graph_destroy_node, "cuGraphDestroyNode", 10000, CUgraphNode)                                 \
  X(graph_instantiate, "cuGraphInstantiateWithParams", 12000, CUgraphExec*, CUgraph,              \
    abi::InstantiateParams*)                                                                      \
  X(graph_launch, "cuGraphLaunch", 10000, CUgraphExec, CUstream)                                  \
  X(graph_exec_destroy, "cuGraphExecDestroy", 10000, CUgraphExec)                                 \
  X(graph_exec_kernel_set_params, "cuGraphExecKernelNodeSetParams", 12000, CUgraphExec,           \
    CUgraphNode, const abi::KernelNodeParams*)                                                    \
  X(graph_exec_memcpy_set_params, "cuGraphExecMemcpyNodeSetParams", 10020, CUgraphExec,           \
    CUgraphNode, const abi::Memcpy3D*, CUcontext)                                                 \
  X(graph_exec_memset_set_params, "cuGraphExecMemsetNodeSetParams", 10020, CUgraphExec,           \
    CUgraphNode, const abi::MemsetNodeParams*, CUcontext)                                         \
  X(graph_exec_child_set_params, "cuGraphExecChildGraphNodeSetParams", 11010, CUgraphExec,        \
    CUgraphNode, CUgraph)                                                                         \
  X(function_get_param_info, "cuFuncGetParamInfo", 12040, CUfunction, size_t, size_t*, size_t*)   \
  X(function_get_name, "cuFuncGetName", 12030, const char**, CUfunction)                          \
  X(function_get_attribute, "cuFuncGetAttribute", 2020, int*, int, CUfunction)                    \
  X(function_set_attribute, "cuFuncSetAttribute", 9000, CUfunction, int, int)                     \
  X(kernel_get_function, "cuKernelGetFunction", 12000, CUfunction*, CUkernel)                     \
  X(module_load_data, "cuModuleLoadData", 2000, CUmodule*, const void*)                           \
  X(module_get_function, "cuModuleGetFunction", 2000, CUfunction*, CUmodule, const char*)         \
  X(module_unload, "cuModuleUnload", 2000, CUmodule)                                              \
  X(launch_kernel, "cuLaunchKernel", 4000, CUfunction, unsigned, unsigned, unsigned, unsigned,    \
    unsigned, unsigned, unsigned, CUstream, void**, void**)                                       \
  X(memory_allocate, "cuMemAlloc", 3020, abi::DevicePointer*, size_t)                             \
  X(memory_free, "cuMemFree", 3020, abi::DevicePointer)                                           \
  X(memory_get_info, "cuMemGetInfo", 3020, size_t*, size_t*)                                      \
  X(memory_get_address_range, "cuMemGetAddressRange", 3020, abi::DevicePointer*, size_t*,         \
    abi::DevicePointer)                                                                           \
  X(memory_allocate_host, "cuMemHostAlloc", 2020, void**, size_t, unsigned)                       \
  X(copy_to_device, "cuMemcpyHtoD", 3020, abi::DevicePointer, const void*, size_t)                \
  X(copy_to_host, "cuMemcpyDtoH", 3020, void*, abi::DevicePointer, size_t)                        \
  X(copy_to_device_async, "cuMemcpyHtoDAsync", 3020, abi::DevicePointer, const void*, size_t,     \
    CUstream)                                                                                     \
  X(copy_on_device_async, "cuMemcpyDtoDAsync", 3020, abi::DevicePointer, abi::DevicePointer,      \
    size_t, CUstream)                                                                             \
  X(memset_d8_async, "cuMemsetD8Async", 3020, abi::DevicePointer, unsigned char, size_t,          \
    CUstream)                                                                                     \
  X(pointer_get_attribute, "cuPointerGetAttribute", 4000, void*, int, abi::DevicePointer)         \
  X(address_reserve, "cuMemAddressReserve", 10020, abi::DevicePointer*, size_t, size_t,           \
    abi::DevicePointer, uint64_t)                                                                 \
  X(address_free, "cuMemAddressFree", 10020, abi::DevicePointer, size_t)                          \
  X(memory_create, "cuMemCreate", 10020, abi::MemoryHandle*, size_t,                              \
    const abi::MemoryAllocationProperties*, uint64_t)                                             \
  X(memory_release, "cuMemRelease", 10020, abi::MemoryHandle)                                     \
  X(memory_map, "cuMemMap", 10020, abi::DevicePointer, size_t, size_t, abi::MemoryHandle,         \
    uint64_t)                                                                                     \
  X(memory_unmap, "cuMemUnmap", 10020, abi::DevicePointer, size_t)                                \
  X(memory_set_access, "cuMemSetAccess", 10020, abi::DevicePointer, size_t,                       \
    const abi::MemoryAccess*, size_t)                                                             \
  X(memory_get_granularity, "cuMemGetAllocationGranularity", 10020, size_t*,                      \
    const abi::MemoryAllocationProperties*, int)
// clang-format on

struct Driver {
#define PYGRAPH_MEMBER(member, symbol, version, ...) abi::Result (*member)(__VA_ARGS__) = nullptr;
  PYGRAPH_DRIVER_FUNCTIONS(PYGRAPH_MEMBER)
#undef PYGRAPH_MEMBER
};

// A driver call failed. `code` is the CUresult; what() quotes the call.
class DriverError : public std::runtime_error {
 public:
  DriverError(const std::string& message, abi::Result code)
      : std::runtime_error(message), code_(code) {}
  abi::Result code() const { return code_; }
  // True if the process can no longer use the GPU (the driver's "process must be terminated").
  bool sticky() const;

 private:
  abi::Result code_;
};

// The driver of this machine, loaded on first use. Thread-safe. Throws DriverError, with the reason
// in what(), if there is no driver, only a stub, or one older than 12.4 (the first that reports the
// layout of kernel parameters).
const Driver& cuda_driver();

// cuGetProcAddress_v2: symbol, where to put the function, ABI version, flags, where to put the
// status.
using GetProcAddress = abi::Result (*)(const char*, void**, int, uint64_t, int*);

// Fills a table through `get`, which cuda_driver() takes from libcuda. Throws like cuda_driver().
Driver load_driver(GetProcAddress get);

// Throws DriverError unless result is success. Use through PYGRAPH_CHECK, which quotes the call.
void check_result(const Driver& driver, abi::Result result, const char* call);

#define PYGRAPH_CHECK(driver, call) \
  ::pygraph::check_result((driver), (driver).call, #call)  // NOLINT(bugprone-macro-parentheses)

}  // namespace pygraph
