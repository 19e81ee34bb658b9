// Executable graphs of the simulated driver, and what their nodes do.
#include <algorithm>
#include <cstdlib>
#include <span>

#include "pygraph/device_patcher.h"
#include "simulator/state.h"

namespace pygraph::simulator {
namespace {

SimulatedExec* as_exec(CUgraphExec exec) {
  return reinterpret_cast<SimulatedExec*>(exec);
}

// A node of the executable for a node of its graph, if it has that kind.
SimulatedNode* find_in_exec(CUgraphExec exec, CUgraphNode node, int type) {
  return is_kind(node, type) ? as_exec(exec)->find(as_node(node)) : nullptr;
}

// cudaGraphKernelNodeSetParam
int set_param_on_device(void* node, uint64_t offset, const void* value, size_t size) {
  auto* original = static_cast<SimulatedNode*>(node);
  if (original->exec == nullptr || !original->exec->is_uploaded) return abi::kInvalidValue;
  std::vector<std::byte>& image = original->exec->find(original)->kernel.image;
  if (offset + size > image.size()) return abi::kInvalidValue;
  std::memcpy(image.data() + offset, value, size);
  return abi::kSuccess;
}

}  // namespace

Kernel patch_kernel() {
  constexpr size_t kChanges = 255;
  constexpr size_t kChangesSize = kChanges * sizeof(DevicePatcher::Change);
  return {"pygraph_patch", {8, 8, kChangesSize}, [](void** params) {
            const auto* words = *static_cast<const DevicePatcher::Word**>(params[0]);
            auto* status = *static_cast<int**>(params[1]);
            const std::span changes(static_cast<const DevicePatcher::Change*>(params[2]), kChanges);
            for (const auto& [address, begin, end] : changes) {
              for (uint32_t i = begin; i < end; ++i) {
                const uint64_t value = address + words[i].addend;
                const int error =
                    set_param_on_device(words[i].node, words[i].offset, &value, sizeof value);
                if (error == abi::kSuccess) continue;
                if (status == nullptr) std::abort();
                *status = error;
              }
            }
          }};
}

SimulatedNode* SimulatedExec::find(const SimulatedNode* original) const {
  for (const auto& node : snapshot->nodes) {
    if (node->original == original) return node.get();
  }
  return nullptr;
}

namespace functions {

abi::Result graph_instantiate(CUgraphExec* exec, CUgraph graph, abi::InstantiateParams* params) {
  std::vector<SimulatedNode*> updatable;
  for (const auto& node : as_graph(graph)->nodes) {
    if (node->is_device_updatable) updatable.push_back(node.get());
  }
  // Such a graph may have one executable at a time.
  if (std::ranges::any_of(updatable, &SimulatedNode::exec)) return abi::kInvalidValue;
  auto* created = new SimulatedExec{copy_graph(*as_graph(graph)), updatable};
  for (SimulatedNode* node : updatable) node->exec = created;
  current_state()->objects.insert(created);
  *exec = reinterpret_cast<CUgraphExec>(created);
  current_state()->last_uses_priorities = (params->flags & abi::kInstantiateUseNodePriority) != 0;
  params->result = 0;
  return abi::kSuccess;
}

abi::Result graph_launch(CUgraphExec exec, CUstream stream) {
  int status = abi::kCaptureStatusNone;
  stream_is_capturing(stream, &status);
  if (status != abi::kCaptureStatusNone) return abi::kCaptureUnsupported;
  as_exec(exec)->is_uploaded = true;
  run_graph(*as_exec(exec)->snapshot);
  return abi::kSuccess;
}

abi::Result graph_upload(CUgraphExec exec, CUstream /*stream*/) {
  as_exec(exec)->is_uploaded = true;
  return abi::kSuccess;
}

abi::Result graph_exec_destroy(CUgraphExec exec) {
  if (current_state()->objects.erase(exec) == 0) return abi::kInvalidValue;
  for (SimulatedNode* node : as_exec(exec)->updatable) node->exec = nullptr;
  delete as_exec(exec);
  return abi::kSuccess;
}

abi::Result graph_exec_kernel_set_params(CUgraphExec exec, CUgraphNode node,
                                         const abi::KernelNodeParams* params) {
  SimulatedNode* found = find_in_exec(exec, node, abi::kNodeKernel);
  if (found == nullptr) return abi::kInvalidValue;
  set_kernel_params(found->kernel, *params);
  return abi::kSuccess;
}

abi::Result graph_exec_memcpy_set_params(CUgraphExec exec, CUgraphNode node,
                                         const abi::Memcpy3D* params, CUcontext /*context*/) {
  SimulatedNode* found = find_in_exec(exec, node, abi::kNodeMemcpy);
  if (found == nullptr || params->height > 1 || params->depth > 1) return abi::kInvalidValue;
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
