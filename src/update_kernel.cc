#include "update_kernel.h"

#include <string>

namespace pygraph {
namespace {

// False if the limit is not what made the driver refuse the parameters, or cannot be raised.
bool raise_shared_memory_limit(const Driver& driver, const Node& node) {
  int limit = 0;
  int fixed = 0;  // bytes of shared memory that the function has by itself
  int device = 0;
  int most = 0;
  const CUfunction function = node.function;
  return driver.function_get_attribute(&limit, abi::kFunctionMaxDynamicSharedBytes, function) ==
             abi::kSuccess &&
         limit >= 0 && static_cast<unsigned>(limit) < node.shared_memory_bytes &&
         driver.function_get_attribute(&fixed, abi::kFunctionSharedBytes, function) ==
             abi::kSuccess &&
         driver.context_get_device(&device) == abi::kSuccess &&
         driver.device_get_attribute(&most, abi::kDeviceMaxSharedBytesPerBlock, device) ==
             abi::kSuccess &&
         driver.function_set_attribute(function, abi::kFunctionMaxDynamicSharedBytes,
                                       most - fixed) == abi::kSuccess;
}

template <typename Set>
void set_params(const Driver& driver, const Node& node, const char* call, const Set& set) {
  abi::Result result = set();
  if (result == abi::kInvalidValue && raise_shared_memory_limit(driver, node)) result = set();
  if (result == abi::kSuccess) return;
  const std::string what = std::string(call) + " for the kernel " + node.name + ", " +
                           std::to_string(node.shared_memory_bytes) +
                           " bytes of dynamic shared memory,";
  check_result(driver, result, what.c_str());
}

}  // namespace

void set_kernel_params(const Driver& driver, const Node& node,
                       const abi::KernelNodeParams& params) {
  set_params(driver, node, "graph_kernel_set_params",
             [&] { return driver.graph_kernel_set_params(node.handle, &params); });
}

void set_kernel_params(const Driver& driver, CUgraphExec exec, const Node& node,
                       const abi::KernelNodeParams& params) {
  set_params(driver, node, "graph_exec_kernel_set_params",
             [&] { return driver.graph_exec_kernel_set_params(exec, node.handle, &params); });
}

}  // namespace pygraph
