// Executable graphs of the simulated driver: copies of the graphs that they were made of.
#include "simulator/state.h"

namespace pygraph::simulator {
namespace {

SimulatedGraph* as_graph(CUgraphExec exec) {
  return reinterpret_cast<SimulatedGraph*>(exec);
}

// A node of the executable for a node of its graph, if it has that kind.
SimulatedNode* find_in_exec(CUgraphExec exec, CUgraphNode node, int type) {
  return is_kind(node, type) ? find_copy(*as_graph(exec), node) : nullptr;
}

}  // namespace

namespace functions {

abi::Result graph_instantiate(CUgraphExec* exec, CUgraph graph, abi::InstantiateParams* params) {
  // It is laid out on the device. (Whether the driver refuses that in a capture is not documented.)
  if ((params->flags & abi::kInstantiateDeviceLaunch) != 0 && !may_allocate()) {
    return abi::kCaptureUnsupported;
  }
  auto* created = copy_graph(*as_graph(graph)).release();
  current_state()->objects.insert(created);
  *exec = reinterpret_cast<CUgraphExec>(created);
  current_state()->last_executable_flags = params->flags;
  params->result = 0;
  return abi::kSuccess;
}

abi::Result graph_launch(CUgraphExec exec, CUstream stream) {
  int status = abi::kCaptureStatusNone;
  stream_is_capturing(stream, &status);
  if (status != abi::kCaptureStatusNone) return abi::kCaptureUnsupported;
  run_graph(*as_graph(exec));
  return abi::kSuccess;
}

abi::Result graph_exec_destroy(CUgraphExec exec) {
  if (current_state()->objects.erase(exec) == 0) return abi::kInvalidValue;
  delete as_graph(exec);
  return abi::kSuccess;
}

abi::Result graph_exec_kernel_set_params(CUgraphExec exec, CUgraphNode node,
                                         const abi::KernelNodeParams* params) {
  SimulatedNode* found = find_in_exec(exec, node, abi::kNodeKernel);
  if (found == nullptr || exceeds_shared_memory(*params)) return abi::kInvalidValue;
  set_kernel_params(found->kernel, *params);
  return abi::kSuccess;
}

abi::Result graph_exec_memcpy_set_params(CUgraphExec exec, CUgraphNode node,
                                         const abi::Memcpy3D* params, CUcontext /*context*/) {
  SimulatedNode* found = find_in_exec(exec, node, abi::kNodeMemcpy);
  if (found == nullptr || params->height > 1 || params->depth > 1) return abi::kInvalidValue;
  // "If the memory operands' mappings changed."
  if (params->src_memory_type != found->memcpy.src_memory_type ||
      params->dst_memory_type != found->memcpy.dst_memory_type) {
    return abi::kInvalidValue;
  }
  found->memcpy = *params;
  return abi::kSuccess;
}

abi::Result graph_exec_memset_set_params(CUgraphExec exec, CUgraphNode node,
                                         const abi::MemsetNodeParams* params,
                                         CUcontext /*context*/) {
  SimulatedNode* found = find_in_exec(exec, node, abi::kNodeMemset);
  if (found == nullptr || params->height > 1) return abi::kInvalidValue;
  found->memset = *params;
  return abi::kSuccess;
}

abi::Result graph_exec_child_set_params(CUgraphExec exec, CUgraphNode node, CUgraph graph) {
  SimulatedNode* found = find_in_exec(exec, node, abi::kNodeGraph);
  if (found == nullptr || found->child->nodes.size() != as_graph(graph)->nodes.size()) {
    return abi::kInvalidValue;
  }
  found->child = copy_graph(*as_graph(graph));
  return abi::kSuccess;
}

}  // namespace functions
}  // namespace pygraph::simulator
