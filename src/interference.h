// Which internal allocations may not share memory, because both may be in use at a time.
#pragma once

#include <vector>

#include "node_set.h"
#include "order.h"
#include "pygraph/link.h"

namespace pygraph {

// In a chain: those whose lifetimes overlap. In a graph with branches, lifetimes are intervals of
// an order that nobody keeps; there, one may follow another if all nodes that use the other have
// ended when any that uses it begins. A node that nothing is known of may use whatever is alive.
class Interference {
 public:
  // Lifetimes must be final. Keeps references.
  Interference(const LinkedGraph& linked, const ExecutionOrder& order);

  // By index of the symbols, both of them internal.
  bool conflict(uint32_t a, uint32_t b) const;

 private:
  struct Uses {
    NodeSet users;
    NodeSet ended;  // when the first of them begins
  };
  const std::vector<Symbol>& symbols_;
  std::vector<Uses> uses_;  // by symbol; none in a chain
};

}  // namespace pygraph
