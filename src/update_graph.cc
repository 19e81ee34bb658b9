// Changes to the graph that was recorded, before it is instantiated.
#include <vector>

#include "graph_lists.h"
#include "pygraph/recording.h"

namespace pygraph {

void set_edges(const Driver& driver, CUgraph graph, const Recording& recording) {
  const DriverEdges old = list_edges(driver, graph);
  DriverEdges edges;
  for (const Edge& edge : recording.edges) {
    if (recording.nodes[edge.from].parent >= 0) continue;
    edges.from.push_back(recording.nodes[edge.from].handle);
    edges.to.push_back(recording.nodes[edge.to].handle);
    edges.data.push_back(edge.data);
  }
  PYGRAPH_CHECK(driver, graph_remove_dependencies(graph, old.from.data(), old.to.data(),
                                                  old.data.data(), old.data.size()));
  PYGRAPH_CHECK(driver, graph_add_dependencies(graph, edges.from.data(), edges.to.data(),
                                               edges.data.data(), edges.data.size()));
}

void retarget_nodes(const Driver& driver, Recording& recording, CUgraph clone) {
  std::vector<CUgraphNode> siblings;  // of the child graph being walked, in creation order
  size_t next_sibling = 0;
  int current_parent = -1;
  for (Node& node : recording.nodes) {
    if (node.parent < 0) {
      CUgraphNode found = nullptr;
      PYGRAPH_CHECK(driver, graph_find_in_clone(&found, node.handle, clone));
      node.handle = found;
      continue;
    }
    if (recording.nodes[node.parent].parent >= 0) {
      throw NotRelocatable("the graph nests child graphs more than one deep");
    }
    if (node.parent != current_parent) {
      current_parent = node.parent;
      CUgraph child = nullptr;
      PYGRAPH_CHECK(driver, graph_child_get_graph(recording.nodes[node.parent].handle, &child));
      siblings = list_nodes(driver, child);
      next_sibling = 0;
    }
    node.handle = siblings.at(next_sibling++);
  }
}

}  // namespace pygraph
