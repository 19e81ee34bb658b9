#include "check_plan.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

namespace pygraph::fuzz {
namespace {

enum class Home : uint8_t { kInput, kOutput, kWorkspace, kBlock };

// A place in memory that is not known before the call.
struct Spot {
  Home home = Home::kWorkspace;
  uint32_t index = 0;
  uint64_t offset = 0;
  auto operator<=>(const Spot&) const = default;
};

struct Use {
  uint32_t step = 0;
  bool is_early = false;
};

// A value, or, of scratch memory, an operator's part of it.
struct Instance {
  uint32_t value = 0;
  Spot spot;
  std::vector<Use> uses;
  uint64_t part = 0;  // of scratch memory: the operator
};

std::string name_of(const Program& program, uint32_t value) {
  static constexpr const char* kNames[] = {"input",    "internal", "output", "scratch",
                                           "constant", "random",   "table"};
  return std::string(kNames[static_cast<size_t>(program.values[value].kind)]) + " value " +
         std::to_string(value);
}

// Which steps have ended when a step begins, and when it goes on after having waited.
class Happened {
 public:
  Happened(const Program& program, const LinkedGraph& linked) {
    const auto count = program.steps.size();
    std::vector<std::vector<std::pair<uint32_t, bool>>> before(count);  // and whether it overlaps
    for (const Edge& edge : linked.recording.edges) {
      const Node& from = linked.recording.nodes[edge.from];
      const Node& to = linked.recording.nodes[edge.to];
      if (from.parent >= 0) continue;
      if (from.position >= to.position) throw Wrong("an edge leads backwards");
      before[to.position].emplace_back(from.position, edge.data.type == 1);
    }
    begin_.resize(count);
    late_.resize(count);
    std::vector<std::set<uint32_t>> done(count);  // when the step and all it overlaps have ended
    for (uint32_t s = 0; s < count; ++s) {
      for (const auto& [from, overlaps] : before[s]) {
        const std::set<uint32_t>& ended = overlaps ? begin_[from] : done[from];
        begin_[s].insert(ended.begin(), ended.end());
      }
      late_[s] = begin_[s];
      done[s] = begin_[s];
      done[s].insert(s);
      for (const auto& [from, overlaps] : before[s]) {
        if (!overlaps) continue;
        done[s].insert(done[from].begin(), done[from].end());
        if (!program.steps[s].waits) continue;
        late_[s].insert(late_[from].begin(), late_[from].end());
        late_[s].insert(from);
      }
    }
  }

  bool is_before(uint32_t step, const Use& use) const {
    return (use.is_early ? begin_ : late_)[use.step].contains(step);
  }
  bool is_all_before(const Instance& a, const Instance& b) const {
    return std::ranges::all_of(b.uses, [&](const Use& later) {
      return std::ranges::all_of(
          a.uses, [&](const Use& use) { return begin_[later.step].contains(use.step); });
    });
  }

 private:
  std::vector<std::set<uint32_t>> begin_;
  std::vector<std::set<uint32_t>> late_;
};

class Checker {
 public:
  Checker(const Program& program, const Recorded& recorded, const LinkedGraph& linked)
      : program_(program), recorded_(recorded), linked_(linked), happened_(program, linked) {}

  void run() {
    for (const bool donated : {false, true}) {
      if (donated && linked_.donated.empty()) break;
      donated_ = donated;
      collect();
      check_bounds();
      check_sharing();
      check_order();
    }
  }

 private:
  // Where the word's address leads.
  Spot follow(uint32_t node, uint32_t offset) const {
    const auto& all = linked_.relocations;
    const auto found =
        std::ranges::lower_bound(all, std::pair(node, offset), {},
                                 [](const Relocation& r) { return std::pair(r.node, r.offset); });
    if (found == all.end() || found->node != node || found->offset != offset) {
      throw Wrong("node " + std::to_string(node) + ", byte " + std::to_string(offset) +
                  ": an address is not relocated");
    }
    const Symbol& symbol = linked_.symbols[found->symbol];
    switch (symbol.kind) {
      case SymbolKind::kInput:
        return in_input(symbol.slot, found->addend);
      case SymbolKind::kOutput: {
        const OutputPlacement& donor = linked_.placements[symbol.slot];
        if (donated_ && donor) return in_input(donor.input, donor.offset + found->addend);
        return {Home::kOutput, symbol.slot, found->addend};
      }
      case SymbolKind::kInternal:
        break;
      case SymbolKind::kRandom:
        throw Wrong("an address became random state");
    }
    const uint64_t place = symbol.workspace_offset + found->addend;
    if (symbol.region == 0) return {Home::kWorkspace, 0, place};
    const Region& region = linked_.regions.at(symbol.region - 1);
    if (region.output != Region::kNoOutput) return {Home::kOutput, region.output, place};
    if (region.input == Region::kOwnBlock) return {Home::kBlock, symbol.region - 1, place};
    if (donated_) return in_input(region.input, place);
    return {Home::kWorkspace, 0, region.fallback_offset + place};
  }

  // Views lie in the input that they are views of.
  Spot in_input(uint32_t slot, uint64_t offset) const {
    const Value& value = program_.values[recorded_.input_slots[slot]];
    if (value.view_of == kNone) return {Home::kInput, slot, offset};
    const auto host = std::ranges::find(recorded_.input_slots, value.view_of);
    return {Home::kInput, static_cast<uint32_t>(host - recorded_.input_slots.begin()),
            value.view_offset + offset};
  }

  void collect() {
    instances_.clear();
    std::map<uint32_t, Spot> stored;  // by value, whose address is in a table
    for (uint32_t s = 0; s < program_.steps.size(); ++s) {
      const Step& step = program_.steps[s];
      for (size_t l = 0; l < step.launches.size(); ++l) {
        for (size_t i = 0; i < step.launches[l].accesses.size(); ++i) {
          const Access& access = step.launches[l].accesses[i];
          const Words& words = recorded_.words[s][l][i];
          const ValueKind kind = program_.values[access.value].kind;
          if (kind == ValueKind::kRandom) {
            check_random(access.value, words);
          } else if (kind != ValueKind::kConstant || access.through != kNone) {
            note(access, words, {s, access.is_early}, stored);
          }
        }
      }
    }
  }

  void note(const Access& access, const Words& words, const Use& use,
            std::map<uint32_t, Spot>& stored) {
    const bool is_constant = program_.values[access.value].kind == ValueKind::kConstant;
    if (access.through != kNone) {
      add(access.through, follow(words.node, words.offset), use);
      if (is_constant) return;
      if (access.stores_address) stored[access.value] = follow(words.node, words.end_offset);
      add(access.value, stored.at(access.value), use);
      return;
    }
    Spot spot = follow(words.node, words.offset);
    if (access.by_end) {
      Spot end = follow(words.node, words.end_offset);
      end.offset -= access.size;
      if (end != spot) throw Wrong(name_of(program_, access.value) + ": its end is elsewhere");
    }
    spot.offset -= access.offset;
    add(access.value, spot, use);
  }

  void add(uint32_t value, const Spot& spot, const Use& use) {
    const uint32_t op = program_.steps[use.step].op;
    uint64_t part = 0;
    if (program_.values[value].kind == ValueKind::kScratch) {
      part = op != kNone ? 1 + uint64_t{op} : (uint64_t{1} << 32) + 1 + use.step;
    }
    for (Instance& instance : instances_) {
      if (instance.value != value || instance.part != part) continue;
      if (instance.spot == spot) return instance.uses.push_back(use);
      throw Wrong(name_of(program_, value) + " is in two places");
    }
    instances_.push_back({value, spot, {use}, part});
  }

  void check_random(uint32_t value, const Words& words) const {
    const auto slot = std::ranges::find(recorded_.random_slots, value);
    for (const bool is_second : {false, true}) {
      const uint32_t offset = is_second ? words.end_offset : words.offset;
      const bool is_right = std::ranges::any_of(linked_.relocations, [&](const Relocation& r) {
        const Symbol& symbol = linked_.symbols[r.symbol];
        return r.node == words.node && r.offset == offset && symbol.kind == SymbolKind::kRandom &&
               symbol.slot == static_cast<uint32_t>(slot - recorded_.random_slots.begin()) &&
               r.addend == (is_second ? 8 : 0);
      });
      if (!is_right) throw Wrong("random state is not relocated");
    }
  }

  uint64_t room(const Spot& spot) const {
    switch (spot.home) {
      case Home::kInput: {
        const Value& value = program_.values[recorded_.input_slots[spot.index]];
        return std::max(value.size, value.given);
      }
      case Home::kOutput: {
        uint64_t size = program_.values[recorded_.output_slots[spot.index]].size;
        for (const Region& region : linked_.regions) {
          if (region.output == spot.index) size = std::max(size, region.size);
        }
        return size;
      }
      case Home::kWorkspace:
        return donated_ ? linked_.workspace_size : linked_.workspace_size_if_kept;
      case Home::kBlock:
        return linked_.regions[spot.index].size;
    }
    return 0;
  }

  void check_bounds() const {
    for (const auto& [value, spot, uses, part] : instances_) {
      const Value& about = program_.values[value];
      if (spot.offset + about.size > room(spot)) {
        throw Wrong(name_of(program_, value) + " does not fit where it is");
      }
      const bool is_input = about.kind == ValueKind::kInput;
      if (!is_input && spot.offset % 512 != 0) throw Wrong(name_of(program_, value) + " is askew");
      if (is_input || spot.home != Home::kInput) continue;
      const Value& host = program_.values[recorded_.input_slots[spot.index]];
      if (host.given == 0) throw Wrong(name_of(program_, value) + " is in an input that is kept");
    }
  }

  static int rank(const Value& value) {  // what shares memory must come in this order
    if (value.kind == ValueKind::kInput) return 0;
    return value.kind == ValueKind::kOutput ? 2 : 1;
  }

  void check_sharing() const {
    for (size_t i = 0; i < instances_.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        const Instance& a = instances_[i];
        const Instance& b = instances_[j];
        if (a.value == b.value && a.spot == b.spot) continue;  // check_order() looks at it
        const Value& x = program_.values[a.value];
        const Value& y = program_.values[b.value];
        const bool is_same_home = a.spot.home == b.spot.home && a.spot.index == b.spot.index;
        const bool overlaps = is_same_home && a.spot.offset < b.spot.offset + y.size &&
                              b.spot.offset < a.spot.offset + x.size;
        if (!overlaps || (rank(x) == 0 && rank(y) == 0)) continue;
        const bool is_fine = (rank(x) <= rank(y) && rank(x) < 2 && happened_.is_all_before(a, b)) ||
                             (rank(y) <= rank(x) && rank(y) < 2 && happened_.is_all_before(b, a));
        if (!is_fine) {
          throw Wrong(name_of(program_, a.value) + " and " + name_of(program_, b.value) +
                      " share memory while both may be in use" + (donated_ ? " (donated)" : ""));
        }
      }
    }
  }

  // Any two inputs may lie in the same memory.
  bool conflict(const Access& a, const Access& b) const {
    if (!a.writes && !b.writes) return false;
    const bool are_inputs = program_.values[a.value].kind == ValueKind::kInput &&
                            program_.values[b.value].kind == ValueKind::kInput;
    if (a.value != b.value) return are_inputs;
    return a.offset < b.offset + b.size && b.offset < a.offset + a.size;
  }

  // Operators may have got scratch memory of their own.
  bool is_shared(uint32_t value, uint32_t s, uint32_t t) const {
    const auto spot_of = [&](uint32_t step) {
      return std::ranges::find_if(instances_,
                                  [&](const Instance& instance) {
                                    return instance.value == value &&
                                           std::ranges::find(instance.uses, step, &Use::step) !=
                                               instance.uses.end();
                                  })
          ->spot;
    };
    return program_.values[value].kind != ValueKind::kScratch || spot_of(s) == spot_of(t);
  }

  void check_order() const {
    for (uint32_t s = 0; s < program_.steps.size(); ++s) {
      for (uint32_t t = 0; t < s; ++t) check_order(t, s);
    }
  }
  void check_order(uint32_t first, uint32_t second) const {
    for (const Launch& a : program_.steps[first].launches) {
      for (const Access& x : a.accesses) {
        for (const Launch& b : program_.steps[second].launches) {
          for (const Access& y : b.accesses) {
            const bool is_in_order = happened_.is_before(first, {second, y.is_early});
            const bool shares_table = x.through != kNone && x.through == y.through;
            if (is_in_order || !(conflict(x, y) || shares_table)) continue;
            if (!is_shared(x.value, first, second)) continue;
            throw Wrong("step " + std::to_string(second) + " does not wait for step " +
                        std::to_string(first) + ", which uses " + name_of(program_, x.value));
          }
        }
      }
    }
  }

  const Program& program_;
  const Recorded& recorded_;
  const LinkedGraph& linked_;
  Happened happened_;
  bool donated_ = false;
  std::vector<Instance> instances_;
};

}  // namespace

void check_plan(const Program& program, const Recorded& recorded, const LinkedGraph& linked) {
  Checker(program, recorded, linked).run();
}

}  // namespace pygraph::fuzz
