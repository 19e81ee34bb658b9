#include "order.h"

#include <algorithm>

namespace pygraph {
namespace {

constexpr uint32_t kNone = ~uint32_t{0};

// An edge between top-level nodes, by their positions.
struct Dependency {
  uint32_t from;
  uint32_t to;
  bool is_programmatic;
};

// None if a node would wait for a later one, or there is an edge of another kind.
std::optional<std::vector<Dependency>> find_dependencies(const Recording& recording,
                                                         uint32_t& count) {
  std::vector<uint32_t> positions(recording.nodes.size(), kNone);
  count = 0;
  for (uint32_t n = 0; n < recording.nodes.size(); ++n) {
    if (recording.nodes[n].parent < 0) positions[n] = count++;
  }
  std::vector<Dependency> found;
  for (const Edge& edge : recording.edges) {
    if (recording.nodes[edge.from].parent >= 0) continue;
    const bool is_programmatic = edge.data == kProgrammatic;
    if (!is_programmatic && edge.data != abi::EdgeData{}) return {};
    found.push_back({positions[edge.from], positions[edge.to], is_programmatic});
    if (found.back().from >= found.back().to) return {};
  }
  return found;
}

// Edges from each node to the next one, and no others.
bool is_chain(const std::vector<Dependency>& dependencies, uint32_t count) {
  uint32_t next = 1;
  for (const Dependency& d : dependencies) {
    if (d.from != next - 1 || d.to != next) return false;
    ++next;
  }
  return next >= count;
}

ExecutionOrder order_of_chain(const std::vector<Dependency>& dependencies, uint32_t count) {
  ExecutionOrder order{std::vector<uint32_t>(count)};
  for (const Dependency& d : dependencies) {
    order.step_begin[d.to] = d.is_programmatic ? order.step_begin[d.from] : d.to;
  }
  return order;
}

ExecutionOrder order_of_branches(const std::vector<Dependency>& dependencies, uint32_t count) {
  ExecutionOrder order{std::vector<uint32_t>(count), false, {count, NodeSet(count)}};
  std::vector<std::vector<uint32_t>> before(count);
  for (const Dependency& d : dependencies) before[d.to].push_back(d.from);
  for (uint32_t p = 0; p < count; ++p) {
    for (const uint32_t b : before[p]) {
      order.ended[p].insert(order.ended[b]);
      order.ended[p].insert(b);
    }
    order.step_begin[p] = order.ended[p].first_missing();
  }
  return order;
}

}  // namespace

bool is_chain(const Recording& recording) {
  uint32_t count = 0;
  const auto dependencies = find_dependencies(recording, count);
  return dependencies && is_chain(*dependencies, count);
}

bool make_edges_full(Recording& recording) {
  bool is_changed = false;
  for (Edge& edge : recording.edges) {
    if (recording.nodes[edge.from].parent >= 0 || edge.data != kProgrammatic) continue;
    edge.data = {};
    is_changed = true;
  }
  return is_changed;
}

std::optional<ExecutionOrder> find_order(const Recording& recording) {
  uint32_t count = 0;
  const auto dependencies = find_dependencies(recording, count);
  if (!dependencies) return {};
  if (is_chain(*dependencies, count)) return order_of_chain(*dependencies, count);
  const bool is_full = std::ranges::none_of(*dependencies, &Dependency::is_programmatic);
  if (!is_full || count > kMostBranchedNodes) return {};
  return order_of_branches(*dependencies, count);
}

}  // namespace pygraph
