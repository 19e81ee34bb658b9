// Graphs of the simulated driver.
#include <algorithm>

#include "simulator/state.h"

namespace pygraph::simulator {

std::unique_ptr<SimulatedGraph> copy_graph(const SimulatedGraph& source) {
  auto copy = std::make_unique<SimulatedGraph>();
  std::map<const SimulatedNode*, SimulatedNode*> copies;
  for (const auto& node : source.nodes) {
    auto twin = std::make_unique<SimulatedNode>();
    twin->type = node->type;
    twin->kernel = node->kernel;
    twin->memcpy = node->memcpy;
    twin->memset = node->memset;
    twin->priority = node->priority;
    if (node->child) twin->child = copy_graph(*node->child);
    twin->owner = copy.get();
    twin->original = node.get();
    copies[node.get()] = twin.get();
    copy->nodes.push_back(std::move(twin));
  }
  for (const auto& [from, to, data] : source.edges) {
    copy->edges.push_back({copies[from], copies[to], data});
  }
  return copy;
}

SimulatedNode* find_copy(const SimulatedGraph& copy, CUgraphNode original) {
  const auto found = std::ranges::find(copy.nodes, as_node(original), &SimulatedNode::original);
  return found == copy.nodes.end() ? nullptr : found->get();
}

bool exceeds_shared_memory(const abi::KernelNodeParams& params) {
  const auto* function = reinterpret_cast<const Function*>(params.func);
  return params.shared_memory_bytes > static_cast<unsigned>(function->max_dynamic_shared);
}

void set_kernel_params(KernelState& kernel, const abi::KernelNodeParams& params) {
  kernel.function = reinterpret_cast<const Function*>(params.func);
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
    as_graph(graph)->edges.push_back({as_node(dependencies[i]), created.get()});
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
      from[i] = as_handle(edges[i].from);
      to[i] = as_handle(edges[i].to);
      data[i] = edges[i].data;
    }
  }
  *count = edges.size();
  return abi::kSuccess;
}

abi::Result graph_add_dependencies(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to,
                                   const abi::EdgeData* data, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    as_graph(graph)->edges.push_back({as_node(from[i]), as_node(to[i]), data[i]});
  }
  return abi::kSuccess;
}

abi::Result graph_remove_dependencies(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to,
                                      const abi::EdgeData* data, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const auto is_it = [&](const SimulatedEdge& edge) {
      return edge.from == as_node(from[i]) && edge.to == as_node(to[i]) && edge.data == data[i];
    };
    if (std::erase_if(as_graph(graph)->edges, is_it) == 0) return abi::kInvalidValue;
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
  if (!is_kind(node, abi::kNodeKernel) || exceeds_shared_memory(*params)) {
    return abi::kInvalidValue;
  }
  set_kernel_params(as_node(node)->kernel, *params);
  return abi::kSuccess;
}

abi::Result graph_kernel_get_attribute(CUgraphNode node, int attribute,
                                       abi::LaunchAttributeValue* value) {
  if (!is_kind(node, abi::kNodeKernel)) return abi::kInvalidValue;
  *value = {};
  if (attribute == abi::kLaunchAttributePriority) value->priority = as_node(node)->priority;
  return abi::kSuccess;
}

abi::Result graph_kernel_set_attribute(CUgraphNode node, int attribute,
                                       abi::LaunchAttributeValue* value) {
  if (!is_kind(node, abi::kNodeKernel)) return abi::kInvalidValue;
  if (attribute == abi::kLaunchAttributePriority) as_node(node)->priority = value->priority;
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
  SimulatedNode* copy = find_copy(*as_graph(clone), node);
  *found = as_handle(copy);
  return copy == nullptr ? abi::kInvalidValue : abi::kSuccess;
}

abi::Result graph_destroy(CUgraph graph) {
  if (current_state()->objects.erase(graph) == 0) return abi::kInvalidValue;
  delete as_graph(graph);
  return abi::kSuccess;
}

abi::Result graph_destroy_node(CUgraphNode node) {
  SimulatedGraph& graph = *as_node(node)->owner;
  std::erase_if(graph.edges, [&](const auto& edge) {
    return edge.from == as_node(node) || edge.to == as_node(node);
  });
  std::erase_if(graph.nodes, [&](const auto& owned) { return owned.get() == as_node(node); });
  return abi::kSuccess;
}

}  // namespace functions
}  // namespace pygraph::simulator
