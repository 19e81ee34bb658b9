// The few driver types PyGraph uses, declared here so that building needs no CUDA toolkit.
//
// Handles are declared exactly as cuda.h declares them, so both headers may be included together.
// Structs and constants live in pygraph::abi; tests/cpp/abi_test.cc compares every size and offset
// with cuda.h where that header exists. Field meanings: CUDA driver API reference, 12.4 and later.
#pragma once

#include <cstddef>
#include <cstdint>

typedef struct CUctx_st* CUcontext;
typedef struct CUmod_st* CUmodule;
typedef struct CUfunc_st* CUfunction;
typedef struct CUkern_st* CUkernel;
typedef struct CUstream_st* CUstream;
typedef struct CUevent_st* CUevent;
typedef struct CUgraph_st* CUgraph;
typedef struct CUgraphNode_st* CUgraphNode;
typedef struct CUgraphExec_st* CUgraphExec;

namespace pygraph::abi {

using Result = int;  // CUresult
using DevicePointer = unsigned long long;
using MemoryHandle = unsigned long long;

inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotInitialized = 3;
inline constexpr Result kDeinitialized = 4;
inline constexpr Result kStubLibrary = 34;
inline constexpr Result kIllegalState = 401;
inline constexpr Result kNotFound = 500;
inline constexpr Result kNotReady = 600;
inline constexpr Result kNotSupported = 801;
inline constexpr Result kCaptureUnsupported = 900;
inline constexpr Result kCaptureInvalidated = 901;
inline constexpr Result kCaptureUnjoined = 904;

// CUgraphNodeType
inline constexpr int kNodeKernel = 0;
inline constexpr int kNodeMemcpy = 1;
inline constexpr int kNodeMemset = 2;
inline constexpr int kNodeHost = 3;
inline constexpr int kNodeGraph = 4;
inline constexpr int kNodeEmpty = 5;

// CUstreamCaptureMode, CUstreamCaptureStatus
inline constexpr int kCaptureModeGlobal = 0;
inline constexpr int kCaptureModeThreadLocal = 1;
inline constexpr int kCaptureModeRelaxed = 2;
inline constexpr int kCaptureStatusNone = 0;
inline constexpr int kCaptureStatusActive = 1;
inline constexpr int kCaptureStatusInvalidated = 2;

// Keys and terminator of CUDA_KERNEL_NODE_PARAMS::extra (CU_LAUNCH_PARAM_*).
// NOLINTBEGIN(readability-identifier-naming): constants, though a cast keeps them from constexpr
inline void* const kLaunchParamEnd = nullptr;
inline void* const kLaunchParamBufferPointer = reinterpret_cast<void*>(1);
inline void* const kLaunchParamBufferSize = reinterpret_cast<void*>(2);
// NOLINTEND(readability-identifier-naming)

inline constexpr int kMemoryTypeHost = 1;
inline constexpr int kMemoryTypeDevice = 2;
inline constexpr int kMemoryTypeArray = 3;
inline constexpr int kMemoryTypeUnified = 4;
inline constexpr int kPointerAttributeMemoryType = 2;
inline constexpr int kPointerAttributeBufferId = 7;

inline constexpr int kFunctionSharedBytes = 1;
inline constexpr int kFunctionMaxDynamicSharedBytes = 8;
inline constexpr int kDeviceMaxSharedBytesPerBlock = 97;  // of blocks that ask for more than 48 KiB

inline constexpr int kLaunchAttributeCooperative = 2;
inline constexpr int kLaunchAttributeClusterDimension = 4;
inline constexpr int kLaunchAttributePriority = 8;

// CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH and _USE_NODE_PRIORITY
inline constexpr uint64_t kInstantiateDeviceLaunch = 4;
inline constexpr uint64_t kInstantiateUseNodePriority = 8;

// CUDA_KERNEL_NODE_PARAMS_v2
struct KernelNodeParams {
  CUfunction func;
  unsigned int grid[3];
  unsigned int block[3];
  unsigned int shared_memory_bytes;
  void** kernel_params;
  void** extra;
  CUkernel kern;
  CUcontext ctx;
};

// CUDA_MEMCPY3D_v2
struct Memcpy3D {
  size_t src_x_bytes, src_y, src_z, src_lod;
  int src_memory_type;
  const void* src_host;
  DevicePointer src_device;
  void* src_array;
  void* reserved0;
  size_t src_pitch, src_height;
  size_t dst_x_bytes, dst_y, dst_z, dst_lod;
  int dst_memory_type;
  void* dst_host;
  DevicePointer dst_device;
  void* dst_array;
  void* reserved1;
  size_t dst_pitch, dst_height;
  size_t width_bytes, height, depth;
};

// CUDA_MEMSET_NODE_PARAMS_v1
struct MemsetNodeParams {
  DevicePointer dst;
  size_t pitch;
  unsigned int value;
  unsigned int element_size;
  size_t width;
  size_t height;
};

// CUgraphEdgeData
struct EdgeData {
  unsigned char from_port;
  unsigned char to_port;
  unsigned char type;
  unsigned char reserved[5];
  bool operator==(const EdgeData&) const = default;
};

// CUDA_GRAPH_INSTANTIATE_PARAMS
struct InstantiateParams {
  uint64_t flags;
  CUstream upload_stream;
  CUgraphNode error_node;
  int result;
};

struct MemoryLocation {
  int type;  // 1: device
  int id;
};

// CUmemAllocationProp
struct MemoryAllocationProperties {
  int type;  // 1: pinned
  int requested_handle_types;
  MemoryLocation location;
  void* win32_metadata;
  unsigned char compression_type;
  unsigned char gpu_direct_rdma_capable;
  unsigned short usage;
  unsigned char reserved[4];
};

// CUmemAccessDesc
struct MemoryAccess {
  MemoryLocation location;
  int flags;  // 3: read and write
};

// CUlaunchAttributeValue: a 64-byte union, of which PyGraph uses three members.
union LaunchAttributeValue {
  char pad[64];
  int cooperative;
  unsigned int cluster[3];
  int priority;
};

}  // namespace pygraph::abi
