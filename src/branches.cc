#include "branches.h"

#include <algorithm>
#include <functional>
#include <map>

namespace pygraph {
namespace {

constexpr uint32_t kNone = ~uint32_t{0};

struct Access {
  uint32_t symbol;
  bool writes;
};

// What each node with known accesses does to which symbol. Two numbers after those of the symbols
// stand for other memory: one for all inputs, and arguments that no symbol stands for, if any of
// them is written; and one for what libraries keep. (Random states are only read.)
std::vector<std::vector<Access>> find_accesses(const LinkedGraph& linked, size_t count) {
  std::vector<std::vector<Access>> accesses(count);
  const auto inputs = static_cast<uint32_t>(linked.symbols.size());
  const uint32_t of_libraries = inputs + 1;
  const auto is_input = [&](uint32_t symbol) {
    return symbol < inputs && linked.symbols[symbol].kind == SymbolKind::kInput;
  };
  bool writes_inputs = false;
  for (const Relocation& relocation : linked.relocations) {
    const Node& node = linked.recording.nodes[relocation.node];
    if (!node.has_known_accesses || !node.may_access(relocation.offset)) continue;
    const bool writes = std::ranges::find(node.writes, relocation.offset) != node.writes.end();
    accesses[node.position].push_back({relocation.symbol, writes});
    writes_inputs = writes_inputs || (writes && is_input(relocation.symbol));
  }
  for (const OtherMemoryUse& use : linked.uses_of_other_memory) {
    const uint32_t symbol = use.is_argument ? inputs : of_libraries;
    accesses[linked.recording.nodes[use.node].position].push_back({symbol, use.writes});
    writes_inputs = writes_inputs || (use.writes && use.is_argument);
  }
  if (!writes_inputs) return accesses;
  for (std::vector<Access>& of_node : accesses) {
    for (Access& access : of_node) {
      if (is_input(access.symbol)) access.symbol = inputs;
    }
  }
  return accesses;
}

// Goes through the nodes in the recorded order.
class BranchScheduler {
 public:
  BranchScheduler(const LinkedGraph& linked, std::vector<uint32_t> nodes, uint32_t lanes)
      : linked_(linked),
        nodes_(std::move(nodes)),
        accesses_(find_accesses(linked, nodes_.size())),
        writers_(linked.symbols.size() + 2, kNone),
        readers_(linked.symbols.size() + 2),
        tails_(lanes, kNone) {}

  Branches find() {
    Branches found{{}, {std::vector<uint32_t>(nodes_.size()), false}, 1};
    for (uint32_t p = 0; p < nodes_.size(); ++p) {
      std::vector<uint32_t> before = reduce(conflicts_of(p));
      const uint32_t lane = choose_lane(before);
      if (tails_[lane] != kNone) before = reduce(std::move(before), tails_[lane]);
      tails_[lane] = p;
      lane_of_.push_back(lane);
      found.lanes = std::max(found.lanes, lane + 1);

      NodeSet ancestors(nodes_.size());
      for (const uint32_t b : before) {
        found.edges.push_back({nodes_[b], nodes_[p]});
        ancestors.insert(ancestors_[b]);
        ancestors.insert(b);
      }
      found.order.ended.push_back(ancestors);
      found.order.step_begin[p] = found.order.ended[p].first_missing();
      ancestors_.push_back(std::move(ancestors));
    }
    return found;
  }

 private:
  bool is_known(uint32_t p) const { return linked_.recording.nodes[nodes_[p]].has_known_accesses; }
  uint32_t op_of(uint32_t p) const { return linked_.recording.nodes[nodes_[p]].op; }

  // Nodes that must have ended before node p begins. Notes what p does.
  std::vector<uint32_t> conflicts_of(uint32_t p) {
    std::vector<uint32_t> before;
    if (!is_known(p)) {
      for (uint32_t other = barrier_ == kNone ? 0 : barrier_; other < p; ++other) {
        before.push_back(other);
      }
      barrier_ = p;
      std::ranges::fill(writers_, kNone);  // the barrier comes after them
      for (std::vector<uint32_t>& readers : readers_) readers.clear();
      return before;
    }
    if (barrier_ != kNone) before.push_back(barrier_);
    if (p > 0 && op_of(p) != Node::kNoOperator && op_of(p) == op_of(p - 1)) before.push_back(p - 1);
    for (const auto& [symbol, writes] : accesses_[p]) {
      if (writers_[symbol] != kNone) before.push_back(writers_[symbol]);
      if (!writes) continue;
      before.insert(before.end(), readers_[symbol].begin(), readers_[symbol].end());
    }
    for (const auto& [symbol, writes] : accesses_[p]) {
      if (!writes) {
        readers_[symbol].push_back(p);
      } else {
        writers_[symbol] = p;
        readers_[symbol].clear();
      }
    }
    std::erase(before, p);
    return before;
  }

  // Without those that others among them wait for; latest first.
  std::vector<uint32_t> reduce(std::vector<uint32_t> before, uint32_t more = kNone) const {
    if (more != kNone) before.push_back(more);
    std::ranges::sort(before, std::greater());
    before.erase(std::unique(before.begin(), before.end()), before.end());
    std::vector<uint32_t> kept;
    for (const uint32_t b : before) {
      const bool is_implied =
          std::ranges::any_of(kept, [&](uint32_t k) { return ancestors_[k].contains(b); });
      if (!is_implied) kept.push_back(b);
    }
    return kept;
  }

  uint32_t choose_lane(const std::vector<uint32_t>& before) const {
    for (const uint32_t b : before) {
      if (tails_[lane_of_[b]] == b) return lane_of_[b];
    }
    const auto has_ended = [&](uint32_t tail) {
      return tail == kNone ||
             std::ranges::any_of(before, [&](uint32_t b) { return ancestors_[b].contains(tail); });
    };
    const auto free = std::ranges::find_if(tails_, has_ended);
    if (free != tails_.end()) return static_cast<uint32_t>(free - tails_.begin());
    // All are busy: behind the node that began first.
    return static_cast<uint32_t>(std::ranges::min_element(tails_) - tails_.begin());
  }

  const LinkedGraph& linked_;
  std::vector<uint32_t> nodes_;  // by position
  std::vector<std::vector<Access>> accesses_;
  std::vector<uint32_t> writers_;               // by symbol: its last writer
  std::vector<std::vector<uint32_t>> readers_;  // by symbol: since then
  uint32_t barrier_ = kNone;                    // the last node with unknown accesses
  std::vector<uint32_t> tails_;                 // by lane: its last node
  std::vector<uint32_t> lane_of_;
  std::vector<NodeSet> ancestors_;  // all that have ended when a node ends, but for itself
};

// The scratch memory with this index.
void split(LinkedGraph& linked, uint32_t index) {
  std::map<uint32_t, uint32_t> parts;  // symbols, by operator
  bool is_still_used = false;
  for (Relocation& relocation : linked.relocations) {
    if (relocation.symbol != index) continue;
    const Node& node = linked.recording.nodes[relocation.node];
    if (node.op == Node::kNoOperator) {
      is_still_used = true;
      continue;
    }
    const auto [part, is_new] =
        parts.try_emplace(node.op, static_cast<uint32_t>(linked.symbols.size()));
    if (is_new) {
      Symbol symbol = linked.symbols[index];
      symbol.first = node.position;
      linked.symbols.push_back(symbol);
    }
    linked.symbols[part->second].last = node.position + 1;
    relocation.symbol = part->second;
  }
  if (!is_still_used) linked.symbols[index].size = 0;
}

}  // namespace

void split_scratch(LinkedGraph& linked) {
  const auto count = static_cast<uint32_t>(linked.symbols.size());
  for (uint32_t i = 0; i < count; ++i) {
    const Symbol& symbol = linked.symbols[i];
    const bool is_scratch = symbol.kind == SymbolKind::kInternal &&
                            linked.recording.is_scratch(symbol.address_b, symbol.last);
    if (is_scratch) split(linked, i);
  }
}

std::optional<Branches> find_branches(const LinkedGraph& linked, uint32_t lanes) {
  const Recording& recording = linked.recording;
  std::vector<uint32_t> nodes;
  for (uint32_t n = 0; n < recording.nodes.size(); ++n) {
    if (recording.nodes[n].parent < 0) nodes.push_back(n);
  }
  if (lanes < 2 || nodes.size() > kMostBranchedNodes) return {};
  Branches found = BranchScheduler(linked, std::move(nodes), lanes).find();
  if (found.lanes == 1) return {};
  for (const Edge& edge : recording.edges) {
    if (recording.nodes[edge.from].parent >= 0) found.edges.push_back(edge);
  }
  std::ranges::sort(found.edges, {},
                    [](const Edge& edge) { return std::pair(edge.from, edge.to); });
  return found;
}

}  // namespace pygraph
