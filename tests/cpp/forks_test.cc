// Graphs whose function forked its stream: what may share memory, and whether results are those of
// the program in every order that the edges allow.
#include <algorithm>
#include <set>

#include "plan_memory.h"
#include "planned_graphs.h"
#include "random_program.h"
#include "test_device.h"

namespace pygraph::testing {
namespace {

// Node 0, then 1 and 2 beside each other, then 3. Each is the only user of its internal memory.
LinkedGraph fork_and_join(const abi::EdgeData& last = {}) {
  LinkedGraph linked = chain(4);
  linked.recording.edges = {{0, 1, {}}, {0, 2, {}}, {1, 3, {}}, {2, 3, last}};
  for (uint32_t n = 0; n < 4; ++n) {
    linked.recording.nodes[n].position = n;
    linked.relocations.push_back({.node = n, .symbol = n});
    add_internal(linked, 4096, n, n + 1, 0x10000 + 4096 * n);
  }
  return linked;
}

TEST(Forks, MemoryIsSharedBetweenNodesThatWaitForEachOther) {
  LinkedGraph linked = fork_and_join();
  plan_memory(linked);
  EXPECT_FALSE(overlap(linked.symbols[1], linked.symbols[2]));
  EXPECT_EQ(linked.workspace_size, 8192);
  constexpr abi::EdgeData kUnknown{.from_port = 2, .to_port = 0, .type = 1, .reserved = {}};
  for (const abi::EdgeData& edge : {kProgrammatic, kUnknown}) {
    linked = fork_and_join(edge);
    plan_memory(linked);
    EXPECT_EQ(linked.workspace_size, 4 * 4096);  // the recorded layout
  }
}

// Two streams take turns. Each node reads what its stream's node before it has written, and nothing
// is known of its accesses. Like PyTorch's allocator, each stream uses three pieces by turns.
TEST(Forks, APlanNeedsNoMoreThanTheRecordedLayout) {
  constexpr uint32_t kNodes = 100;
  LinkedGraph linked = chain(kNodes);
  linked.recording.edges.clear();
  for (uint32_t n = 0; n < kNodes; ++n) {
    linked.recording.nodes[n].kind = NodeKind::kKernel;
    linked.recording.nodes[n].position = n;
    linked.recording.operators.push_back({.name = "aten::op", .first = n, .last = n + 1});
    add_internal(linked, 4096, n, n + 3, 0x10000 + 4096 * (n % 6));
    linked.relocations.push_back({.node = n, .offset = 0, .symbol = n});
    if (n < 2) continue;
    linked.relocations.push_back({.node = n, .offset = 8, .symbol = n - 2});
    linked.recording.edges.push_back({n - 2, n, {}});
  }
  plan_memory(linked);
  EXPECT_LE(linked.workspace_size, 6 * 4096);
}

TEST(Forks, AnOutputTakesADonatedInputOnlyOnceAllBranchesHaveUsedIt) {
  for (const uint32_t user : {2U, 3U}) {
    LinkedGraph linked = fork_and_join();
    linked.recording.inputs.resize(1);
    linked.recording.outputs.resize(1);
    linked.relocations.push_back({.node = 1, .symbol = 4});
    linked.symbols.push_back({SymbolKind::kInput, 0, 4 * kMiB});
    linked.relocations.push_back({.node = user, .symbol = 5});
    linked.symbols.push_back({SymbolKind::kOutput, 0, 4 * kMiB});
    plan_memory(linked, {.donated = {{0, 4 * kMiB}}});
    EXPECT_EQ(static_cast<bool>(linked.placements[0]), user == 3);
  }
}

// Nodes on three streams that wait for each other now and then, as a capture would see them.
LinkedGraph random_forks(std::mt19937& random) {
  LinkedGraph linked = random_chain(random);
  std::vector<Node>& nodes = linked.recording.nodes;
  linked.recording.edges.clear();
  std::vector<uint32_t> tails = {0, 0, 0};
  for (uint32_t n = 1; n < nodes.size(); ++n) {
    const size_t stream = random() % 3;
    std::set<uint32_t> before = {tails[stream]};
    if (random() % 2 == 0) before.insert(tails[random() % 3]);
    if (n % 10 == 0) before.insert(tails.begin(), tails.end());
    for (const uint32_t b : before) {
      linked.recording.edges.push_back({b, n, {}});
    }
    tails[stream] = n;
    nodes[n].has_known_accesses = random() % 2 == 0;
  }
  for (uint32_t s = 0; s < linked.symbols.size(); ++s) {
    Symbol& symbol = linked.symbols[s];
    symbol.address_b = 0x1000000 * (s + 1);
    if (symbol.kind != SymbolKind::kInternal) continue;
    for (uint32_t n = symbol.first; n < std::min<uint32_t>(symbol.last, nodes.size()); ++n) {
      if (n == symbol.first || random() % 2 == 0) linked.relocations.push_back({n, 8, s, 0});
    }
  }
  for (const Relocation& relocation : linked.relocations) {
    nodes[relocation.node].reads.push_back(relocation.offset);
  }
  return linked;
}

// Which nodes have ended when another begins.
class Ended {
 public:
  explicit Ended(const Recording& recording) : before_(recording.nodes.size()) {
    for (size_t n = 0; n < before_.size(); ++n) {
      for (const Edge& edge : recording.edges) {
        if (edge.to != n) continue;
        before_[n].insert(edge.from);
        before_[n].insert(before_[edge.from].begin(), before_[edge.from].end());
      }
    }
  }
  bool when_begins(uint32_t node, uint32_t other) const { return before_[node].contains(other); }

 private:
  std::vector<std::set<uint32_t>> before_;
};

TEST(Forks, WhatSharesMemoryIsUsedOneAfterTheOther) {
  std::mt19937 random(1);
  size_t shared = 0;
  size_t handed_over = 0;
  for (int round = 0; round < 200; ++round) {
    LinkedGraph linked = random_forks(random);
    std::vector<DonatedInput> donated;
    for (uint32_t slot = 0; slot < 10; slot += 2)
      donated.push_back({slot, linked.symbols[2 * slot].size});
    plan_memory(linked, {.donated = donated, .smallest_block = round % 2 == 0 ? 3 * kMiB : 0});
    const Ended ended(linked.recording);
    std::vector<std::vector<uint32_t>> users(linked.symbols.size());
    for (const Relocation& r : linked.relocations) users[r.symbol].push_back(r.node);
    const auto is_done = [&](uint32_t first, uint32_t second) {
      return std::ranges::all_of(users[second], [&](uint32_t node) {
        return std::ranges::all_of(users[first],
                                   [&](uint32_t other) { return ended.when_begins(node, other); });
      });
    };
    const auto symbol_of = [](SymbolKind kind, uint32_t slot) {
      return 2 * slot + (kind == SymbolKind::kOutput ? 1 : 0);
    };
    for (uint32_t output = 0; output < 10; ++output) {
      const OutputPlacement& donor = linked.placements[output];
      if (!donor) continue;
      ++handed_over;
      EXPECT_TRUE(is_done(symbol_of(SymbolKind::kInput, donor.input),
                          symbol_of(SymbolKind::kOutput, output)));
    }
    for (uint32_t a = 20; a < linked.symbols.size(); ++a) {
      for (uint32_t b = 20; b < a; ++b) {
        const Symbol &one = linked.symbols[a], &other = linked.symbols[b];
        if (one.region != other.region || !overlap(one, other)) continue;
        ++shared;
        EXPECT_TRUE(is_done(a, b) || is_done(b, a)) << a << " and " << b;
      }
      if (linked.symbols[a].region == 0) continue;
      const Region& region = linked.regions[linked.symbols[a].region - 1];
      if (region.output != Region::kNoOutput) {
        EXPECT_TRUE(is_done(a, symbol_of(SymbolKind::kOutput, region.output)));
      }
      if (region.input == Region::kOwnBlock) continue;
      EXPECT_TRUE(is_done(symbol_of(SymbolKind::kInput, region.input), a));
      for (uint32_t output = 0; output < 10; ++output) {
        if (linked.placements[output].input != region.input) continue;
        EXPECT_TRUE(is_done(a, symbol_of(SymbolKind::kOutput, output)));
      }
    }
  }
  EXPECT_GT(shared, 1000);
  EXPECT_GT(handed_over, 20);
}

// Records a program's steps on two streams. Between a fork and its join, a step uses no result of
// the other stream, and nothing is freed.
class ForkedProgram {
 public:
  ForkedProgram(const Device& device, const Program& program, unsigned seed)
      : device_(device),
        program_(program),
        seed_(seed),
        side_(create_stream(device.driver())),
        event_(create_event(device.driver())) {}

  std::vector<uint64_t> record(Session& s) const {
    std::mt19937 random(seed_);
    std::vector<uint64_t> values(s.inputs.begin(), s.inputs.end());
    std::vector<size_t> freed;  // when the streams join
    size_t forked_at = 0;       // values from here on were made since the fork
    std::set<size_t> on_side;
    bool is_forked = false;
    const auto join = [&] {
      if (is_forked) wait(s.stream, side_.get());
      is_forked = false;
      for (const size_t value : freed) s.pool.free(values[value]);
      freed.clear();
    };
    for (const Step& step : program_.steps) {
      const auto is_new_on = [&](size_t value, bool side) {
        return is_forked && value >= forked_at && on_side.contains(value) == side;
      };
      const size_t b = step.is_sum ? step.b : step.a;
      const bool needs_side = is_new_on(step.a, true) || is_new_on(b, true);
      const bool needs_main = is_new_on(step.a, false) || is_new_on(b, false);
      if ((needs_side && needs_main) || random() % 6 == 0) {
        join();
      } else if (!is_forked && random() % 2 == 0) {
        wait(side_.get(), s.stream);
        is_forked = true;
        forked_at = values.size();
        on_side.clear();
      }
      const bool side = is_forked && !needs_main && (needs_side || random() % 2 == 0);
      if (side) on_side.insert(values.size());
      const uint64_t result = s.pool.allocate(kBytes);
      launch(side ? side_.get() : s.stream, step, result, values);
      values.push_back(result);
      freed.insert(freed.end(), step.freed.begin(), step.freed.end());
      if (!is_forked) join();
    }
    join();
    std::vector<uint64_t> results;
    for (const size_t output : program_.outputs) results.push_back(values[output]);
    return results;
  }

 private:
  void wait(CUstream waiting, CUstream stream) const {
    PYGRAPH_CHECK(device_.driver(), event_record(event_.get(), stream));
    PYGRAPH_CHECK(device_.driver(), stream_wait_event(waiting, event_.get(), 0));
  }
  void launch(CUstream stream, const Step& step, uint64_t result,
              const std::vector<uint64_t>& values) const {
    if (step.is_sum) {
      device_.add(stream, result, values[step.a], values[step.b], kCount);
    } else {
      device_.add_constant(stream, result, values[step.a], kCount, 1);
    }
  }

  const Device& device_;
  const Program& program_;
  unsigned seed_;
  Stream side_;
  Event event_;
};

class ForkedProgramTest : public DeviceTest {};

TEST_F(ForkedProgramTest, NoKernelStartsBeforeThoseThatItWaitsForHaveEnded) {
  size_t forked = 0;
  for (unsigned seed = 0; seed < 8; ++seed) {
    const Program program(seed);
    const ForkedProgram forks(device, program, seed);
    TwoRecordings recordings = record_twice(device, std::vector<uint64_t>(kInputs, kInputBytes),
                                            [&](Session& s) { return forks.record(s); });
    for (Recording* recording : {&recordings.first, &recordings.second}) {
      recording->edges.back().data = kProgrammatic;
    }
    const bool is_forked = !is_chain(recordings.second);
    const LinkedGraph linked = recordings.link(driver);
    EXPECT_EQ(linked.has_new_edges, is_forked);
    EXPECT_EQ(linked.recording.edges.back().data == kProgrammatic, !is_forked);
    forked += is_forked ? 1 : 0;
  }
  EXPECT_GT(forked, 3);
}

TEST_F(ForkedProgramTest, ResultsAreThoseOfTheProgramInEveryOrder) {
  size_t forked = 0;
  size_t handed_over = 0;
  for (unsigned seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    const Program program(seed);
    const ForkedProgram forks(device, program, seed);
    TwoRecordings recordings = record_twice(device, std::vector<uint64_t>(kInputs, kInputBytes),
                                            [&](Session& s) { return forks.record(s); });
    LinkedGraph linked = recordings.link(driver, {.donated = {{0, kBytes}, {2, kBytes}},
                                                  .smallest_block = seed % 2 == 1 ? kBytes : 0});
    if (!is_chain(linked.recording)) {
      ++forked;
      handed_over += std::ranges::count_if(linked.placements, [](auto p) { return bool(p); });
    }
    ExecutableGraph graph(driver, std::move(recordings.graph), std::move(linked));
    for (unsigned round = 0; round < 4; ++round) {
      if (device.is_simulated()) device.simulator().shuffle(round);
      replay(device, stream.get(), graph, program, round % 2 == 0, static_cast<float>(10 * round));
    }
  }
  EXPECT_GT(forked, 15);
  EXPECT_GT(handed_over, 5);
}

}  // namespace
}  // namespace pygraph::testing
