// Our declarations of driver structs against cuda.h, where it exists: same sizes, same offsets.
#include <gtest/gtest.h>

#include <cstddef>

#include "pygraph/cuda_abi.h"

#if __has_include(<cuda.h>)
#include <cuda.h>

namespace pygraph::abi {

#define SAME_SIZE(ours, theirs) static_assert(sizeof(ours) == sizeof(theirs))
#define SAME_OFFSET(ours, member, theirs, their_member) \
  static_assert(offsetof(ours, member) == offsetof(theirs, their_member))

SAME_SIZE(KernelNodeParams, CUDA_KERNEL_NODE_PARAMS_v2);
SAME_OFFSET(KernelNodeParams, block, CUDA_KERNEL_NODE_PARAMS_v2, blockDimX);
SAME_OFFSET(KernelNodeParams, shared_memory_bytes, CUDA_KERNEL_NODE_PARAMS_v2, sharedMemBytes);
SAME_OFFSET(KernelNodeParams, kernel_params, CUDA_KERNEL_NODE_PARAMS_v2, kernelParams);
SAME_OFFSET(KernelNodeParams, extra, CUDA_KERNEL_NODE_PARAMS_v2, extra);
SAME_OFFSET(KernelNodeParams, ctx, CUDA_KERNEL_NODE_PARAMS_v2, ctx);
SAME_SIZE(Memcpy3D, CUDA_MEMCPY3D_v2);
SAME_OFFSET(Memcpy3D, src_device, CUDA_MEMCPY3D_v2, srcDevice);
SAME_OFFSET(Memcpy3D, dst_device, CUDA_MEMCPY3D_v2, dstDevice);
SAME_OFFSET(Memcpy3D, width_bytes, CUDA_MEMCPY3D_v2, WidthInBytes);
SAME_SIZE(MemsetNodeParams, CUDA_MEMSET_NODE_PARAMS_v1);
SAME_OFFSET(MemsetNodeParams, element_size, CUDA_MEMSET_NODE_PARAMS_v1, elementSize);
SAME_OFFSET(MemsetNodeParams, height, CUDA_MEMSET_NODE_PARAMS_v1, height);
SAME_SIZE(EdgeData, CUgraphEdgeData);
SAME_SIZE(InstantiateParams, CUDA_GRAPH_INSTANTIATE_PARAMS);
SAME_OFFSET(InstantiateParams, result, CUDA_GRAPH_INSTANTIATE_PARAMS, result_out);
SAME_SIZE(MemoryAllocationProperties, CUmemAllocationProp);
SAME_OFFSET(MemoryAllocationProperties, location, CUmemAllocationProp, location);
SAME_OFFSET(MemoryAllocationProperties, usage, CUmemAllocationProp, allocFlags.usage);
SAME_SIZE(MemoryAccess, CUmemAccessDesc);
SAME_SIZE(LaunchAttributeValue, CUlaunchAttributeValue);

TEST(Abi, ConstantsEqualCudaHeader) {
  EXPECT_EQ(kNodeKernel, CU_GRAPH_NODE_TYPE_KERNEL);
  EXPECT_EQ(kNodeMemcpy, CU_GRAPH_NODE_TYPE_MEMCPY);
  EXPECT_EQ(kNodeMemset, CU_GRAPH_NODE_TYPE_MEMSET);
  EXPECT_EQ(kNodeHost, CU_GRAPH_NODE_TYPE_HOST);
  EXPECT_EQ(kNodeGraph, CU_GRAPH_NODE_TYPE_GRAPH);
  EXPECT_EQ(kNodeEmpty, CU_GRAPH_NODE_TYPE_EMPTY);
  EXPECT_EQ(kCaptureModeGlobal, CU_STREAM_CAPTURE_MODE_GLOBAL);
  EXPECT_EQ(kCaptureModeThreadLocal, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  EXPECT_EQ(kCaptureModeRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
  EXPECT_EQ(kPointerAttributeMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
  EXPECT_EQ(kPointerAttributeBufferId, CU_POINTER_ATTRIBUTE_BUFFER_ID);
  EXPECT_EQ(kMemoryTypeHost, CU_MEMORYTYPE_HOST);
  EXPECT_EQ(kMemoryTypeArray, CU_MEMORYTYPE_ARRAY);
  EXPECT_EQ(kLaunchAttributeCooperative, CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
  EXPECT_EQ(kLaunchAttributeClusterDimension, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
  EXPECT_EQ(kLaunchAttributePriority, CU_LAUNCH_ATTRIBUTE_PRIORITY);
  EXPECT_EQ(kInstantiateUseNodePriority, CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY);
  EXPECT_EQ(kNotReady, CUDA_ERROR_NOT_READY);
  EXPECT_EQ(kLaunchParamBufferPointer, CU_LAUNCH_PARAM_BUFFER_POINTER);
  EXPECT_EQ(kLaunchParamBufferSize, CU_LAUNCH_PARAM_BUFFER_SIZE);
  EXPECT_EQ(kCaptureUnsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_EQ(kCaptureInvalidated, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_EQ(kIllegalState, CUDA_ERROR_ILLEGAL_STATE);
}

}  // namespace pygraph::abi
#else
TEST(Abi, ConstantsEqualCudaHeader) {
  GTEST_SKIP() << "no cuda.h on this machine";
}
#endif
