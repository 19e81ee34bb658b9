#include "graph_lists.h"

namespace pygraph {

std::vector<CUgraphNode> list_nodes(const Driver& driver, CUgraph graph) {
  size_t count = 0;
  PYGRAPH_CHECK(driver, graph_get_nodes(graph, nullptr, &count));
  std::vector<CUgraphNode> nodes(count);
  if (count > 0) PYGRAPH_CHECK(driver, graph_get_nodes(graph, nodes.data(), &count));
  return nodes;
}

DriverEdges list_edges(const Driver& driver, CUgraph graph) {
  size_t count = 0;
  PYGRAPH_CHECK(driver, graph_get_edges(graph, nullptr, nullptr, nullptr, &count));
  DriverEdges edges{std::vector<CUgraphNode>(count), std::vector<CUgraphNode>(count),
                    std::vector<abi::EdgeData>(count)};
  if (count == 0) return edges;
  PYGRAPH_CHECK(driver, graph_get_edges(graph, edges.from.data(), edges.to.data(),
                                        edges.data.data(), &count));
  return edges;
}

}  // namespace pygraph
