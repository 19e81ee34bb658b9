// The nodes and edges of a graph, as the driver lists them. All throw DriverError.
#pragma once

#include <vector>

#include "pygraph/driver.h"

namespace pygraph {

// In the order of creation; none of child graphs.
std::vector<CUgraphNode> list_nodes(const Driver& driver, CUgraph graph);

// Edges as the driver takes them.
struct DriverEdges {
  std::vector<CUgraphNode> from;
  std::vector<CUgraphNode> to;
  std::vector<abi::EdgeData> data;
};

DriverEdges list_edges(const Driver& driver, CUgraph graph);

}  // namespace pygraph
