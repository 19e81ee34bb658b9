#include "life.h"

#include <algorithm>
#include <random>
#include <vector>

#include "check_plan.h"
#include "replays.h"

namespace pygraph::fuzz {
namespace {

const std::vector<std::string>& symbols() {
  static const std::vector<std::string> all = {
#define PYGRAPH_SYMBOL(member, symbol, version, ...) symbol,
      PYGRAPH_DRIVER_FUNCTIONS(PYGRAPH_SYMBOL)
#undef PYGRAPH_SYMBOL
  };
  return all;
}

// Functions that give something back. If they fail, the driver keeps it.
bool gives_back(const std::string& symbol) {
  for (const char* word : {"Destroy", "Unmap", "Release", "Free", "Unload"}) {
    if (symbol.find(word) != std::string::npos) return true;
  }
  return false;
}

MemoryOptions options_of(const Program& program, const Recorded& recorded) {
  MemoryOptions options{.smallest_block = program.smallest_block};
  for (uint32_t slot = 0; slot < recorded.input_slots.size(); ++slot) {
    const uint32_t v = recorded.input_slots[slot];
    if (program.values[v].given == 0) continue;
    DonatedInput input{.slot = slot, .size = program.values[v].given};
    for (uint32_t other = 0; other < recorded.input_slots.size(); ++other) {
      const bool is_view = program.values[recorded.input_slots[other]].view_of == v;
      if (is_view) input.views.push_back(other);
    }
    options.donated.push_back(std::move(input));
  }
  for (uint32_t slot = 0; slot < recorded.output_slots.size(); ++slot) {
    if (program.values[recorded.output_slots[slot]].shares) options.sharing.push_back(slot);
  }
  return options;
}

// Whether some node does not wait for the one before it.
bool is_forked(const Recording& recording) {
  uint32_t last = kNone;
  for (uint32_t n = 0; n < recording.nodes.size(); ++n) {
    if (recording.nodes[n].parent >= 0) continue;
    const auto leads_here = [&](const Edge& edge) { return edge.from == last && edge.to == n; };
    if (last != kNone && std::ranges::none_of(recording.edges, leads_here)) return true;
    last = n;
  }
  return false;
}

class Life {
 public:
  Life(Machine& machine, Arena& arena, const Program& program, Tally& tally, bool may_fail)
      : machine_(machine),
        driver_(machine.driver()),
        arena_(arena),
        program_(program),
        tally_(tally),
        may_fail_(may_fail),
        random_(program.seed + 1) {}

  void run() {
    machine_.simulator().shuffle(program_.seed);
    Recorded recorded = machine_.record(program_);
    for (const auto& space : recorded.spaces) space->poison();
    LinkedGraph linked = link(driver_, recorded.recordings[0], recorded.recordings[1],
                              options_of(program_, recorded), program_.lanes, surroundings());
    check_plan(program_, recorded, linked);
    tally_.with_branches += linked.lanes > 1 ? 1 : 0;
    tally_.with_forks += linked.lanes == 1 && is_forked(linked.recording) ? 1 : 0;
    tally_.with_regions += linked.regions.empty() ? 0 : 1;
    for (const OutputPlacement& donor : linked.placements) {
      if (!donor) continue;
      ++tally_.with_donors;
      break;
    }
    Graph graph = std::move(recorded.graph);
    if (program_.seed % 2 == 0) {  // as the bindings do
      CUgraph clone = nullptr;
      PYGRAPH_CHECK(driver_, graph_clone(&clone, graph.get()));
      Graph owned(driver_, clone);
      retarget_nodes(driver_, linked.recording, clone);
      graph = std::move(owned);
    }
    if (linked.has_new_edges) set_edges(driver_, graph.get(), linked.recording);
    const LinkedGraph plan = linked;
    Replays replays(machine_, arena_, program_, recorded, plan);
    const bool may_donate = !plan.donated.empty();
    executable_ = std::make_unique<ExecutableGraph>(driver_, std::move(graph), std::move(linked));
    for (uint32_t i = 0; i < program_.replays; ++i) {
      replays.move();
      const bool donated = may_donate && random_() % 3 != 0;
      replay(replays, donated);
      if (random_() % 5 == 0) go_on_with_a_copy();
    }
    for (const auto& space : recorded.spaces) {
      if (!space->untouched()) throw Wrong("stand-in memory was written");
    }
  }

 private:
  // Of some programs, constants are held; of others, they are allocations that somebody may free.
  Surroundings surroundings() const {
    Surroundings surroundings;
    surroundings.cached = [this] { return machine_.foreign_memory(); };
    for (size_t v = 0; program_.seed % 3 != 0 && v < program_.values.size(); ++v) {
      const Value& value = program_.values[v];
      if (value.kind != ValueKind::kConstant) continue;
      surroundings.held.push_back({machine_.constants()[v], value.size});
    }
    return surroundings;
  }

  // After a failure of the driver the same call is made again, as the next call of a user.
  void replay(Replays& replays, bool donated) {
    for (int attempt = 0;; ++attempt) {
      const std::vector<uint64_t> addresses = replays.prepare(donated);
      try {
        executable_->bind(addresses);
        executable_->launch(machine_.stream());
        break;
      } catch (const DriverError&) {
        if (!may_fail_ || attempt > 0) throw;
      } catch (const MemoryGone&) {  // the driver did not say whose memory a constant is
        if (!may_fail_ || attempt > 0) throw;
      }
    }
    ++tally_.replays;
    tally_.donated += donated ? 1 : 0;
    replays.check();
  }

  void go_on_with_a_copy() {
    try {
      executable_ = executable_->copy();
    } catch (const DriverError&) {
      if (!may_fail_) throw;
    }
  }

  Machine& machine_;
  const Driver& driver_;
  Arena& arena_;
  const Program& program_;
  Tally& tally_;
  bool may_fail_;
  std::mt19937_64 random_;
  std::unique_ptr<ExecutableGraph> executable_;
};

}  // namespace

void live(Machine& machine, Arena& arena, const Program& program, Tally& tally,
          const Fault* fault) {
  machine.begin(program);
  const size_t before = machine.simulator().live_objects();
  if (fault != nullptr) machine.simulator().fail(fault->symbol, fault->call, fault->code);
  try {
    Life(machine, arena, program, tally, fault != nullptr).run();
  } catch (const DriverError&) {
    if (fault == nullptr) throw;
  } catch (const NotRelocatable&) {
    ++tally.refused;
  }
  machine.simulator().forget_failures();
  ++tally.programs;
  if (fault != nullptr) ++tally.failures;
  const bool may_leave_some = fault != nullptr && gives_back(fault->symbol);
  if (machine.simulator().live_objects() != before && !may_leave_some) {
    throw Wrong("something of the driver's was left behind");
  }
  machine.end();
}

std::map<std::string, int> calls_of(Machine& machine, Arena& arena, const Program& program) {
  std::map<std::string, int> calls;
  for (const std::string& symbol : symbols()) calls[symbol] = -machine.simulator().calls(symbol);
  Tally tally;
  live(machine, arena, program, tally);
  for (const std::string& symbol : symbols()) calls[symbol] += machine.simulator().calls(symbol);
  std::erase_if(calls, [](const auto& entry) { return entry.second == 0; });
  return calls;
}

Fault choose_fault(Machine& machine, Arena& arena, const Program& program, uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::map<std::string, int> calls = calls_of(machine, arena, program);
  const auto& [symbol, count] =
      *std::next(calls.begin(), static_cast<ptrdiff_t>(random() % calls.size()));
  static constexpr abi::Result kCodes[] = {abi::kOutOfMemory, abi::kInvalidValue,
                                           abi::kNotSupported};
  return {symbol, static_cast<int>(1 + random() % count), kCodes[random() % 3]};
}

}  // namespace pygraph::fuzz
