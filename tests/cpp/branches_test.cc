// Which nodes may run beside each other, and whether results are the same when they do.

#include "branches.h"

#include <algorithm>
#include <set>

#include "plan_memory.h"
#include "planned_graphs.h"
#include "random_program.h"
#include "test_device.h"

namespace pygraph::testing {
namespace {

using Edges = std::set<std::pair<uint32_t, uint32_t>>;

// A chain whose nodes write to the first of their symbols and read the others. Symbol 0 is an
// input, the others are internal.
LinkedGraph chain_of(const std::vector<std::vector<uint32_t>>& nodes) {
  const auto count = static_cast<uint32_t>(nodes.size());
  LinkedGraph linked = chain(count);
  linked.recording.inputs.resize(1);
  linked.symbols.push_back({SymbolKind::kInput, 0, 4096});
  for (uint32_t n = 0; n < count; ++n) {
    Node& node = linked.recording.nodes[n];
    node.position = n;
    node.has_known_accesses = true;
    for (uint32_t i = 0; i < nodes[n].size(); ++i) {
      while (linked.symbols.size() <= nodes[n][i]) add_internal(linked, 4096, 0, count);
      linked.relocations.push_back({n, 8 * i, nodes[n][i], 0});
      (i > 0 ? node.reads : node.writes).push_back(8 * i);
    }
  }
  return linked;
}

std::optional<Branches> branches_of(const LinkedGraph& linked, uint32_t lanes = 8) {
  return find_branches(linked, lanes);
}

Edges edges_of(const Branches& branches) {
  Edges edges;
  for (const Edge& edge : branches.edges) edges.emplace(edge.from, edge.to);
  return edges;
}

TEST(Branches, ReadersOfOneResultRunBesideEachOther) {
  const auto found = branches_of(chain_of({{1, 0}, {2, 1}, {3, 1}, {4, 2, 3}}));
  ASSERT_TRUE(found);
  EXPECT_EQ(edges_of(*found), (Edges{{0, 1}, {0, 2}, {1, 3}, {2, 3}}));
  EXPECT_EQ(found->lanes, 2);
  // Node 2 does not wait for 1, so nothing that 1 uses may serve 2.
  EXPECT_EQ(found->order.step_begin, (std::vector<uint32_t>{0, 1, 1, 3}));
}

TEST(Branches, ANodeWaitsForThoseThatReadWhatItOverwrites) {
  const auto found = branches_of(chain_of({{1, 0}, {2, 1}, {3, 0}, {1, 0}}));
  ASSERT_TRUE(found);
  EXPECT_TRUE(edges_of(*found).contains({1, 3}));
}

TEST(Branches, AChainThatNeedsItsOrderStaysAsItIs) {
  EXPECT_FALSE(branches_of(chain_of({{1, 0}, {2, 1}, {3, 2}})));
  EXPECT_FALSE(branches_of(chain_of({{1, 0}, {1, 0}, {1, 0}})));
  EXPECT_FALSE(branches_of(chain_of({{1, 0}, {2, 0}}), 1));
}

TEST(Branches, ANodeThatNothingIsKnownOfWaitsForAllAndAllForIt) {
  LinkedGraph linked = chain_of({{1, 0}, {2, 0}, {3, 0}, {4, 0}, {5, 0}});
  linked.recording.nodes[2].has_known_accesses = false;
  const auto found = branches_of(linked);
  ASSERT_TRUE(found);
  EXPECT_EQ(edges_of(*found), (Edges{{0, 2}, {1, 2}, {2, 3}, {2, 4}}));
}

TEST(Branches, InputsMayLieInTheSameMemory) {
  LinkedGraph linked = chain_of({{1, 0}, {2, 0}});
  linked.symbols[1].kind = SymbolKind::kInput;  // written by 0
  EXPECT_FALSE(branches_of(linked));
  linked.symbols[1].kind = SymbolKind::kOutput;
  EXPECT_TRUE(branches_of(linked));
}

TEST(Branches, WhatLibrariesKeepOrdersTheirKernels) {
  LinkedGraph linked = chain_of({{1, 0}, {2, 0}, {3, 0}, {4, 0}});
  const auto use = [](uint32_t node) { return OtherMemoryUse{node, false, true}; };
  linked.uses_of_other_memory = {use(0), use(1), use(3)};
  EXPECT_EQ(edges_of(*branches_of(linked)), (Edges{{0, 1}, {1, 3}}));
}

TEST(Branches, ArgumentsThatNoSymbolStandsForMayBeInputs) {
  LinkedGraph linked = chain_of({{1, 0}, {2, 0}, {3, 0}, {4, 0}});
  linked.uses_of_other_memory = {{0, true, false}, {1, true, false}};
  EXPECT_EQ(branches_of(linked)->edges.size(), 0);  // nobody writes
  linked.uses_of_other_memory = {{0, true, false}, {2, true, true}};
  EXPECT_EQ(edges_of(*branches_of(linked)), (Edges{{0, 2}, {1, 2}, {2, 3}}));
  linked = chain_of({{1}, {0}, {2, 1}});  // node 1 writes the input
  linked.uses_of_other_memory = {{0, true, false}};
  EXPECT_EQ(edges_of(*branches_of(linked)), (Edges{{0, 1}, {0, 2}}));
}

TEST(Branches, NodesOfOneOperatorStayInOrder) {
  LinkedGraph linked = chain_of({{1, 0}, {2, 0}, {3, 0}});
  linked.recording.nodes[0].op = linked.recording.nodes[1].op = 7;
  const auto found = branches_of(linked);
  ASSERT_TRUE(found);
  EXPECT_EQ(edges_of(*found), (Edges{{0, 1}}));
}

TEST(Branches, LeftoversInPaddingOrderNothing) {
  LinkedGraph linked = chain_of({{1, 0}, {2, 0}});
  linked.relocations.push_back({1, 64, 1, 0});
  EXPECT_TRUE(branches_of(linked));
  linked.recording.nodes[1].has_known_accesses = false;
  EXPECT_FALSE(branches_of(linked));
}

TEST(Branches, NoMoreNodesRunAtATimeThanLanes) {
  std::vector<std::vector<uint32_t>> nodes;
  for (uint32_t n = 0; n < 12; ++n) nodes.push_back({n + 1, 0});
  for (const uint32_t lanes : {2U, 3U, 5U}) {
    const auto found = branches_of(chain_of(nodes), lanes);
    ASSERT_TRUE(found);
    EXPECT_EQ(found->lanes, lanes);
    EXPECT_EQ(found->edges.size(), 12 - lanes);  // as many chains
  }
}

TEST(Branches, NoKernelStartsBeforeThoseThatItWaitsForHaveEnded) {
  LinkedGraph linked = chain_of({{1, 0}, {2, 1}, {3, 0}, {4, 3}});
  for (Edge& edge : linked.recording.edges) edge.data = kProgrammatic;
  const auto found = branches_of(linked);
  ASSERT_TRUE(found);
  EXPECT_EQ(edges_of(*found), (Edges{{0, 1}, {2, 3}}));
  for (const Edge& edge : found->edges) EXPECT_EQ(edge.data, abi::EdgeData{});
  EXPECT_EQ(found->order.step_begin, (std::vector<uint32_t>{0, 1, 0, 0}));
  EXPECT_TRUE(found->order.ended[1].contains(0));
  EXPECT_TRUE(found->order.ended[3].contains(2));
}

// Four operators of one node each, that read the input and use one workspace.
LinkedGraph with_scratch() {
  LinkedGraph linked = chain_of({{2, 0}, {3, 0}, {4, 0}, {5, 2, 3, 4}});
  linked.symbols[1].address_b = 0x1000;
  linked.symbols[1].last = Allocation::kNever;
  linked.recording.scratch = {0x1000};
  for (uint32_t n = 0; n < 4; ++n) {
    linked.recording.nodes[n].op = n;
    linked.recording.nodes[n].writes.push_back(64);
    linked.relocations.push_back({n, 64, 1, 0});
  }
  return linked;
}

TEST(Scratch, OperatorsThatShareNothingElseRunBesideEachOther) {
  LinkedGraph linked = with_scratch();
  EXPECT_FALSE(branches_of(linked));
  split_scratch(linked);
  const auto found = branches_of(linked);
  ASSERT_TRUE(found);
  EXPECT_EQ(edges_of(*found), (Edges{{0, 3}, {1, 3}, {2, 3}}));
  plan_memory(linked, {}, found->order);
  std::vector<Symbol> parts;
  for (const Relocation& relocation : linked.relocations) {
    if (relocation.offset == 64) parts.push_back(linked.symbols[relocation.symbol]);
  }
  ASSERT_EQ(parts.size(), 4);
  EXPECT_FALSE(overlap(parts[0], parts[1]));
  EXPECT_FALSE(overlap(parts[0], parts[2]));
  EXPECT_FALSE(overlap(parts[1], parts[2]));
  const bool reuses =
      overlap(parts[3], parts[0]) || overlap(parts[3], parts[1]) || overlap(parts[3], parts[2]);
  EXPECT_TRUE(reuses);  // it runs after them
}

TEST(Scratch, ANodeOutsideOfOperatorsKeepsItToItself) {
  LinkedGraph linked = with_scratch();
  linked.recording.nodes[2].op = Node::kNoOperator;
  linked.recording.nodes[2].has_known_accesses = false;
  split_scratch(linked);
  const auto found = branches_of(linked);
  ASSERT_TRUE(found);
  EXPECT_EQ(edges_of(*found), (Edges{{0, 2}, {1, 2}, {2, 3}}));
  plan_memory(linked, {}, found->order);
  EXPECT_EQ(linked.symbols[1].size, 4096);
  for (const Relocation& relocation : linked.relocations) {
    const bool is_kept = relocation.offset == 64 && relocation.node == 2;
    if (is_kept) {
      EXPECT_EQ(relocation.symbol, 1);
    }
  }
}

TEST(Scratch, OtherMemoryIsNotSplit) {
  LinkedGraph linked = with_scratch();
  linked.recording.scratch.clear();
  split_scratch(linked);
  EXPECT_FALSE(branches_of(linked));
}

TEST(Scratch, WhatHadTheAddressBeforeIsNotSplit) {
  LinkedGraph linked = with_scratch();
  linked.symbols[1].last = 4;  // freed while recording; scratch memory is not
  split_scratch(linked);
  EXPECT_FALSE(branches_of(linked));
}

// Nodes 0, 2, 4 are one branch, 1, 3, 5 another: what a branch is done with serves it again.
TEST(Interference, MemoryIsReusedWithinABranchButNotAcross) {
  LinkedGraph linked = chain_of({{1, 0}, {2, 0}, {3, 1}, {4, 2}, {5, 3}, {6, 4}});
  for (uint32_t s = 1; s < 7; ++s) {
    linked.symbols[s].first = s - 1;
    linked.symbols[s].last = std::min(s + 2, 6U);
  }
  const auto found = branches_of(linked);
  ASSERT_TRUE(found);
  plan_memory(linked, {}, found->order);
  EXPECT_EQ(linked.workspace_size, 4 * 4096);
  for (const uint32_t one : {1U, 3U, 5U}) {
    for (const uint32_t other : {2U, 4U, 6U}) {
      EXPECT_FALSE(overlap(linked.symbols[one], linked.symbols[other]));
    }
  }
}

class BranchedProgramTest : public DeviceTest {};

// The simulator runs nodes in any order that edges allow: what is missing among them, or memory
// that was shared too early, shows in the results.
TEST_F(BranchedProgramTest, ResultsAreThoseOfTheProgramInEveryOrder) {
  size_t branched = 0;
  for (unsigned seed = 0; seed < 24; ++seed) {
    SCOPED_TRACE(seed);
    const Program program(seed);
    TwoRecordings recordings = record_twice(device, std::vector<uint64_t>(kInputs, kInputBytes),
                                            [&](Session& s) { return program.record(device, s); });
    declare_reads(recordings.second);
    if (seed % 4 == 0)
      recordings.second.nodes[recordings.second.nodes.size() / 2].has_known_accesses = false;
    LinkedGraph linked = recordings.link(
        driver,
        {.donated = {{0, kBytes}, {2, kBytes}}, .smallest_block = seed % 2 == 1 ? kBytes : 0},
        2 + seed % 4);
    branched += linked.lanes > 1 ? 1 : 0;
    if (linked.has_new_edges) set_edges(driver, recordings.graph.get(), linked.recording);
    ExecutableGraph graph(driver, std::move(recordings.graph), std::move(linked));
    for (unsigned round = 0; round < 4; ++round) {
      if (device.is_simulated()) device.simulator().shuffle(round);
      replay(device, stream.get(), graph, program, round % 2 == 0, static_cast<float>(10 * round));
    }
  }
  EXPECT_GT(branched, 15);
}

}  // namespace
}  // namespace pygraph::testing
