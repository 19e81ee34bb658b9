// From two recordings of one computation to a graph that runs at any addresses. Each step has a
// file of its own, and throws NotRelocatable where the computation does not allow it.
#include "pygraph/link.h"

#include <optional>
#include <utility>

#include "branches.h"
#include "plan_memory.h"

namespace pygraph {

LinkedGraph link(const Driver& driver, const Recording& first, Recording second,
                 const MemoryOptions& memory, uint32_t lanes, const Surroundings& surroundings) {
  LinkedGraph linked;
  // The same computation? Throws if not.
  match_recordings(first, second);
  linked.recording = std::move(second);
  // Which words are addresses, and of what?
  scan_relocations(driver, first, linked, surroundings);
  // What may run beside what?
  std::optional<Branches> branches;
  if (!is_chain(linked.recording)) {
    linked.has_new_edges = make_edges_full(linked.recording);
  } else if (lanes > 1) {
    split_scratch(linked);
    branches = find_branches(linked, lanes);
  }
  // Where does each internal allocation live? Layout is frozen from here.
  if (branches) {
    linked.recording.edges = std::move(branches->edges);
    linked.has_new_edges = true;
    linked.lanes = branches->lanes;
    plan_memory(linked, memory, branches->order);
  } else {
    plan_memory(linked, memory);
  }
  return linked;
}

}  // namespace pygraph
