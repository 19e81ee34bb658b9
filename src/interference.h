// Which internal allocations may not share memory, because both may be in use at a time.
#pragma once

#include <span>
#include <vector>

#include "hidden_uses.h"
#include "node_set.h"
#include "order.h"
#include "pygraph/link.h"

namespace pygraph {

// In a chain: allocations whose lifetimes overlap. In a graph with branches the recorded order is
// not kept, so lifetimes are not sufficient; there, an allocation may reuse the memory of another
// one if all nodes that use the other have ended when the first node that uses it begins. Uses that
// are no relocations count, too (hidden_uses.h).
class Interference {
 public:
  // Lifetimes must be final. Keeps references.
  Interference(const LinkedGraph& linked, const ExecutionOrder& order,
               std::span<const HiddenUse> hidden);

  // By index of the symbols, both of them internal.
  bool conflict(uint32_t a, uint32_t b) const;

 private:
  struct Uses {
    NodeSet users;
    NodeSet ended;  // when the first of them begins
    uint32_t first_user = ~uint32_t{0};
    uint32_t last_user = 0;
    bool are_all_in(const NodeSet& set) const {
      return first_user > last_user || set.contains(users, first_user, last_user);
    }
  };
  const std::vector<Symbol>& symbols_;
  std::vector<Uses> uses_;  // by symbol; none in a chain
};

}  // namespace pygraph
