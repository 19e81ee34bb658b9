// Graphs and executable graphs of the simulated driver.
#include <algorithm>
#include <cstdlib>
#include <span>

#include "pygraph/device_patcher.h"
#include "simulator/state.h"

namespace pygraph::simulator {
namespace {

SimulatedNode* as_node(CUgraphNode node) {
  return reinterpret_cast<SimulatedNode*>(node);
}
CUgraphNode as_handle(SimulatedNode* node) {
  return reinterpret_cast<CUgraphNode>(node);
}
SimulatedGraph* as_graph(CUgraph graph) {
  return reinterpret_cast<SimulatedGraph*>(graph);
}
SimulatedExec* as_exec(CUgraphExec exec) {
  return reinterpret_cast<SimulatedExec*>(exec);
}
const Function* as_function(CUfunction function) {
  return reinterpret_cast<const Function*>(function);
}

bool is_kind(CUgraphNode node, int type) {
  return node != nullptr && as_node(node)->type == type;
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

void run_memcpy(const abi::Memcpy3D& copy) {
  std::memcpy(reinterpret_cast<void*>(copy.dst_device),
              reinterpret_cast<const void*>(copy.src_device), copy.width_bytes);
}

void run_memset(const abi::MemsetNodeParams& fill) {
  for (size_t row = 0; row < std::max<size_t>(fill.height, 1); ++row) {
    auto* line = reinterpret_cast<std::byte*>(fill.dst + row * fill.pitch);
    for (size_t i = 0; i < fill.width; ++i) {
      std::memcpy(line + i * fill.element_size, &fill.value, fill.element_size);
    }
  }
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

std::unique_ptr<SimulatedGraph> copy_graph(const SimulatedGraph& source) {
  auto copy = std::make_unique<SimulatedGraph>();
  std::map<const SimulatedNode*, SimulatedNode*> copies;
  for (const auto& node : source.nodes) {
    auto twin = std::make_unique<SimulatedNode>();
    twin->type = node->type;
    twin->kernel = node->kernel;
    twin->memcpy = node->memcpy;
    twin->memset = node->memset;
    if (node->child) twin->child = copy_graph(*node->child);
    twin->owner = copy.get();
    twin->original = node.get();
    copies[node.get()] = twin.get();
    copy->nodes.push_back(std::move(twin));
  }
  for (const auto& [from, to] : source.edges) copy->edges.emplace_back(copies[from], copies[to]);
  return copy;
}

void set_kernel_params(KernelState& kernel, const abi::KernelNodeParams& params) {
  kernel.function = as_function(params.func);
  std::copy_n(params.grid, 3, kernel.grid.begin());
  std::copy_n(params.block, 3, kernel.block.begin());
  kernel.shared_memory_bytes = params.shared_memory_bytes;
  kernel.packed = params.extra != nullptr;
  if (kernel.packed) {
    const auto* bytes = static_cast<const std::byte*>(params.extra[1]);
    kernel.image.assign(bytes, bytes + *static_cast<const size_t*>(params.extra[3]));
    return;
  }
  kernel.image.assign(kernel.function->image_size, std::byte{0});
  for (size_t i = 0; i < kernel.function->layout.size(); ++i) {
    const auto [offset, size] = kernel.function->layout[i];
    std::memcpy(kernel.image.data() + offset, params.kernel_params[i], size);
  }
}

void run_node(const SimulatedNode& node) {
  if (node.type == abi::kNodeKernel) {
    std::vector<std::byte> image = node.kernel.image;  // the launch's own copy
    image.resize(std::max(image.size(), node.kernel.function->image_size));
    std::vector<void*> params;
    for (const auto& [offset, size] : node.kernel.function->layout) {
      params.push_back(image.data() + offset);
    }
    node.kernel.function->kernel.body(params.data());
  } else if (node.type == abi::kNodeMemcpy) {
    run_memcpy(node.memcpy);
  } else if (node.type == abi::kNodeMemset) {
    run_memset(node.memset);
  } else if (node.type == abi::kNodeGraph) {
    run_graph(*node.child);
  }
}

void run_graph(const SimulatedGraph& graph) {
  std::optional<std::mt19937>& order = current_state()->order;
  // Creation order respects every edge, since an edge always leads to a younger node.
  std::vector<const SimulatedNode*> left;
  for (const auto& node : graph.nodes) left.push_back(node.get());
  while (!left.empty()) {
    const auto waits = [&](const SimulatedNode* node) {
      return std::ranges::any_of(graph.edges, [&](const auto& edge) {
        return edge.second == node && std::ranges::find(left, edge.first) != left.end();
      });
    };
    size_t next = 0;
    if (order) {
      do {
        next = (*order)() % left.size();
      } while (waits(left[next]));
    }
    run_node(*left[next]);
    left.erase(left.begin() + static_cast<ptrdiff_t>(next));
  }
}

namespace functions {

abi::Result graph_create(CUgraph* graph, unsigned flags) {
  if (flags != 0) return abi::kInvalidValue;
  auto* created = new SimulatedGraph;
  current_state()->objects.insert(created);
  *graph = reinterpret_cast<CUgraph>(created);
  return abi::kSuccess;
}

abi::Result graph_add_child(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies,
                            size_t count, CUgraph child) {
  auto created = std::make_unique<SimulatedNode>();
  created->type = abi::kNodeGraph;
  created->child = copy_graph(*as_graph(child));
  created->owner = as_graph(graph);
  for (size_t i = 0; i < count; ++i) {
    as_graph(graph)->edges.emplace_back(as_node(dependencies[i]), created.get());
  }
  *node = as_handle(created.get());
  as_graph(graph)->nodes.push_back(std::move(created));
  return abi::kSuccess;
}

abi::Result graph_get_nodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
  const auto& all = as_graph(graph)->nodes;
  if (nodes != nullptr) {
    for (size_t i = 0; i < std::min(*count, all.size()); ++i) nodes[i] = as_handle(all[i].get());
  }
  *count = all.size();
  return abi::kSuccess;
}

abi::Result graph_get_edges(CUgraph graph, CUgraphNode* from, CUgraphNode* to, abi::EdgeData* data,
                            size_t* count) {
  const auto& edges = as_graph(graph)->edges;
  if (from != nullptr) {
    for (size_t i = 0; i < std::min(*count, edges.size()); ++i) {
      from[i] = as_handle(edges[i].first);
      to[i] = as_handle(edges[i].second);
      data[i] = {};
    }
  }
  *count = edges.size();
  return abi::kSuccess;
}

abi::Result graph_add_dependencies(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to,
                                   const abi::EdgeData* /*data*/, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    as_graph(graph)->edges.emplace_back(as_node(from[i]), as_node(to[i]));
  }
  return abi::kSuccess;
}

abi::Result graph_remove_dependencies(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to,
                                      const abi::EdgeData* /*data*/, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (std::erase(as_graph(graph)->edges, std::pair(as_node(from[i]), as_node(to[i]))) == 0) {
      return abi::kInvalidValue;
    }
  }
  return abi::kSuccess;
}

abi::Result graph_node_get_type(CUgraphNode node, int* type) {
  *type = as_node(node)->type;
  return abi::kSuccess;
}

abi::Result graph_kernel_get_params(CUgraphNode node, abi::KernelNodeParams* params) {
  if (!is_kind(node, abi::kNodeKernel)) return abi::kInvalidValue;
  KernelState& kernel = as_node(node)->kernel;
  *params = {};
  params->func = reinterpret_cast<CUfunction>(const_cast<Function*>(kernel.function));
  std::copy_n(kernel.grid.begin(), 3, params->grid);
  std::copy_n(kernel.block.begin(), 3, params->block);
  params->shared_memory_bytes = kernel.shared_memory_bytes;
  if (kernel.packed) {
    kernel.packed_size = kernel.image.size();
    kernel.extra = {abi::kLaunchParamBufferPointer, kernel.image.data(),
                    abi::kLaunchParamBufferSize, &kernel.packed_size, abi::kLaunchParamEnd};
    params->extra = kernel.extra.data();
  } else {
    kernel.pointers.clear();
    for (const auto& [offset, size] : kernel.function->layout) {
      kernel.pointers.push_back(kernel.image.data() + offset);
    }
    params->kernel_params = kernel.pointers.data();
  }
  return abi::kSuccess;
}

abi::Result graph_kernel_set_params(CUgraphNode node, const abi::KernelNodeParams* params) {
  if (!is_kind(node, abi::kNodeKernel)) return abi::kInvalidValue;
  set_kernel_params(as_node(node)->kernel, *params);
  return abi::kSuccess;
}

abi::Result graph_kernel_get_attribute(CUgraphNode node, int /*attribute*/,
                                       abi::LaunchAttributeValue* value) {
  if (!is_kind(node, abi::kNodeKernel)) return abi::kInvalidValue;
  *value = {};
  return abi::kSuccess;
}

abi::Result graph_kernel_set_attribute(CUgraphNode node, int attribute,
                                       abi::LaunchAttributeValue* value) {
  if (!is_kind(node, abi::kNodeKernel)) return abi::kInvalidValue;
  if (attribute != abi::kLaunchAttributeDeviceUpdatable) return abi::kSuccess;
  if (value->device_updatable.is_updatable != 1) return abi::kInvalidValue;  // no way back
  as_node(node)->is_device_updatable = true;
  value->device_updatable.node = as_node(node);
  return abi::kSuccess;
}

abi::Result graph_memcpy_get_params(CUgraphNode node, abi::Memcpy3D* params) {
  if (!is_kind(node, abi::kNodeMemcpy)) return abi::kInvalidValue;
  *params = as_node(node)->memcpy;
  return abi::kSuccess;
}

abi::Result graph_memcpy_set_params(CUgraphNode node, const abi::Memcpy3D* params) {
  if (!is_kind(node, abi::kNodeMemcpy)) return abi::kInvalidValue;
  as_node(node)->memcpy = *params;
  return abi::kSuccess;
}

abi::Result graph_memset_get_params(CUgraphNode node, abi::MemsetNodeParams* params) {
  if (!is_kind(node, abi::kNodeMemset)) return abi::kInvalidValue;
  *params = as_node(node)->memset;
  return abi::kSuccess;
}

abi::Result graph_memset_set_params(CUgraphNode node, const abi::MemsetNodeParams* params) {
  if (!is_kind(node, abi::kNodeMemset)) return abi::kInvalidValue;
  as_node(node)->memset = *params;
  return abi::kSuccess;
}

abi::Result graph_child_get_graph(CUgraphNode node, CUgraph* graph) {
  if (!is_kind(node, abi::kNodeGraph)) return abi::kInvalidValue;
  *graph = reinterpret_cast<CUgraph>(as_node(node)->child.get());
  return abi::kSuccess;
}

abi::Result graph_clone(CUgraph* clone, CUgraph graph) {
  SimulatedGraph* copy = copy_graph(*as_graph(graph)).release();
  current_state()->objects.insert(copy);
  *clone = reinterpret_cast<CUgraph>(copy);
  return abi::kSuccess;
}

abi::Result graph_find_in_clone(CUgraphNode* found, CUgraphNode node, CUgraph clone) {
  for (const auto& candidate : as_graph(clone)->nodes) {
    if (candidate->original == as_node(node)) {
      *found = as_handle(candidate.get());
      return abi::kSuccess;
    }
  }
  return abi::kInvalidValue;
}

abi::Result graph_destroy(CUgraph graph) {
  if (current_state()->objects.erase(graph) == 0) return abi::kInvalidValue;
  delete as_graph(graph);
  return abi::kSuccess;
}

abi::Result graph_destroy_node(CUgraphNode node) {
  SimulatedGraph& graph = *as_node(node)->owner;
  std::erase_if(graph.edges, [&](const auto& edge) {
    return edge.first == as_node(node) || edge.second == as_node(node);
  });
  std::erase_if(graph.nodes, [&](const auto& owned) { return owned.get() == as_node(node); });
  return abi::kSuccess;
}

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
