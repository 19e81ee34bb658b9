#include <algorithm>
#include <cstring>
#include <string>

#include "graph_lists.h"
#include "pygraph/recording.h"

namespace pygraph {
namespace {

template <typename T>
std::vector<std::byte> to_image(const T& value) {
  std::vector<std::byte> image(sizeof value);
  std::memcpy(image.data(), &value, sizeof value);
  return image;
}

// `extra` is a list of key, value pairs: the buffer's address and the address of its size.
void read_packed_params(void** extra, Node& node) {
  const void* buffer = nullptr;
  size_t size = 0;
  for (size_t i = 0; extra[i] != abi::kLaunchParamEnd; i += 2) {
    if (extra[i] == abi::kLaunchParamBufferPointer) buffer = extra[i + 1];
    if (extra[i] == abi::kLaunchParamBufferSize) size = *static_cast<size_t*>(extra[i + 1]);
  }
  node.packed = true;
  node.image.resize(size);
  if (size > 0) std::memcpy(node.image.data(), buffer, size);
}

void read_separate_params(const Driver& driver, void** params, Node& node) {
  size_t offset = 0;
  size_t size = 0;
  // The driver has no count: it answers "invalid value" past the last parameter.
  for (size_t i = 0;; ++i) {
    const abi::Result result = driver.function_get_param_info(node.function, i, &offset, &size);
    if (result == abi::kInvalidValue) break;
    check_result(driver, result, "function_get_param_info");
    if (params == nullptr) throw NotRelocatable("kernel " + node.name + " hides its parameters");
    node.params.push_back({offset, size});
    node.image.resize(std::max(node.image.size(), offset + size));
    std::memcpy(node.image.data() + offset, params[i], size);
  }
}

void read_kernel(const Driver& driver, Node& node) {
  abi::KernelNodeParams params{};
  PYGRAPH_CHECK(driver, graph_kernel_get_params(node.handle, &params));
  node.function = params.func;
  node.kernel = params.kern;
  node.context = params.ctx;
  if (node.function == nullptr) {
    PYGRAPH_CHECK(driver, kernel_get_function(&node.function, params.kern));
  }
  const char* name = nullptr;
  PYGRAPH_CHECK(driver, function_get_name(&name, node.function));
  node.name = name;
  std::copy_n(params.grid, 3, node.grid.begin());
  std::copy_n(params.block, 3, node.block.begin());
  node.shared_memory_bytes = params.shared_memory_bytes;
  if (params.extra != nullptr) {
    read_packed_params(params.extra, node);
  } else {
    read_separate_params(driver, params.kernel_params, node);
  }
}

void read_nodes(const Driver& driver, CUgraph graph, int parent, Recording& recording);

void read_child_graph(const Driver& driver, CUgraphNode handle, uint32_t index,
                      Recording& recording) {
  CUgraph child = nullptr;
  PYGRAPH_CHECK(driver, graph_child_get_graph(handle, &child));
  read_nodes(driver, child, static_cast<int>(index), recording);
  // Updating a child graph drops launch attributes: a kernel that needs one must not be updated.
  for (size_t i = index + 1; i < recording.nodes.size(); ++i) {
    const Node& node = recording.nodes[i];
    if (node.kind != NodeKind::kKernel) continue;
    abi::LaunchAttributeValue cluster{};
    abi::LaunchAttributeValue cooperative{};
    PYGRAPH_CHECK(driver, graph_kernel_get_attribute(
                              node.handle, abi::kLaunchAttributeClusterDimension, &cluster));
    PYGRAPH_CHECK(driver, graph_kernel_get_attribute(node.handle, abi::kLaunchAttributeCooperative,
                                                     &cooperative));
    if (cluster.cluster[0] > 1 || cluster.cluster[1] > 1 || cluster.cluster[2] > 1 ||
        cooperative.cooperative != 0) {
      throw NotRelocatable("kernel " + node.name + " in a child graph needs launch attributes");
    }
  }
}

void read_nodes(const Driver& driver, CUgraph graph, int parent, Recording& recording) {
  const std::vector<CUgraphNode> handles = list_nodes(driver, graph);
  std::vector<std::pair<CUgraphNode, uint32_t>> index_of;
  for (uint32_t i = 0; i < handles.size(); ++i) {
    const auto index = static_cast<uint32_t>(recording.nodes.size());
    index_of.emplace_back(handles[i], index);
    Node node;
    node.handle = handles[i];
    node.parent = parent;
    node.position = parent < 0 ? i : recording.nodes[parent].position;
    int type = 0;
    PYGRAPH_CHECK(driver, graph_node_get_type(node.handle, &type));
    switch (type) {
      case abi::kNodeKernel:
        node.kind = NodeKind::kKernel;
        read_kernel(driver, node);
        break;
      case abi::kNodeMemcpy: {
        node.kind = NodeKind::kMemcpy;
        abi::Memcpy3D params{};
        PYGRAPH_CHECK(driver, graph_memcpy_get_params(node.handle, &params));
        node.image = to_image(params);
        break;
      }
      case abi::kNodeMemset: {
        node.kind = NodeKind::kMemset;
        abi::MemsetNodeParams params{};
        PYGRAPH_CHECK(driver, graph_memset_get_params(node.handle, &params));
        node.image = to_image(params);
        break;
      }
      case abi::kNodeGraph:
        node.kind = NodeKind::kChildGraph;
        break;
      case abi::kNodeEmpty:
        break;
      case abi::kNodeHost:
        throw NotRelocatable("the graph contains a host callback");
      default:
        throw NotRelocatable("the graph contains a node of unknown kind " + std::to_string(type));
    }
    const bool is_child = node.kind == NodeKind::kChildGraph;
    recording.nodes.push_back(std::move(node));
    if (is_child) read_child_graph(driver, handles[i], index, recording);
  }

  const DriverEdges edges = list_edges(driver, graph);
  std::sort(index_of.begin(), index_of.end());
  const auto find = [&](CUgraphNode handle) {
    return std::lower_bound(index_of.begin(), index_of.end(), std::pair(handle, 0U))->second;
  };
  for (size_t i = 0; i < edges.data.size(); ++i) {
    recording.edges.push_back({find(edges.from[i]), find(edges.to[i]), edges.data[i]});
  }
}

}  // namespace

Recording read_graph(const Driver& driver, CUgraph graph) {
  Recording recording;
  read_nodes(driver, graph, -1, recording);
  std::ranges::sort(recording.edges, {},
                    [](const Edge& edge) { return std::pair(edge.from, edge.to); });
  return recording;
}

}  // namespace pygraph
