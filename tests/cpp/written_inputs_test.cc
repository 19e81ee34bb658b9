// What a recording says of the inputs it may write to, and of uses of memory that nothing shows.
#include "pygraph/written_inputs.h"

#include <gtest/gtest.h>

#include <cstring>

#include "planned_graphs.h"

namespace pygraph::testing {
namespace {

constexpr uint64_t kBase = 0x10000;

// Two inputs of 256 bytes, and one kernel that gets both addresses.
Recording one_kernel() {
  Recording recording;
  recording.address_space = {kBase, 0x10000};
  recording.inputs = {{kBase, 256}, {kBase + 1024, 256}};
  Node node;
  node.kind = NodeKind::kKernel;
  node.image.resize(16);
  const std::array<uint64_t, 2> words = {kBase + 16, kBase + 1024};
  std::memcpy(node.image.data(), words.data(), 16);
  recording.nodes.push_back(node);
  return recording;
}

using Slots = std::vector<uint32_t>;

TEST(WrittenInputs, AnUnknownKernelMayWriteToAllItPointsTo) {
  EXPECT_EQ(written_inputs(one_kernel()), (Slots{0, 1}));
}

TEST(WrittenInputs, ADeclaredKernelWritesWhatItSays) {
  Recording recording = one_kernel();
  recording.nodes[0].has_known_accesses = true;
  recording.nodes[0].reads = {0};
  recording.nodes[0].writes = {8};
  EXPECT_EQ(written_inputs(recording), Slots{1});
}

TEST(WrittenInputs, AnOwnOperatorWritesWhatItsSchemaSays) {
  Recording recording = one_kernel();
  recording.operators.push_back({.name = "aten::add_",
                                 .last = 1,
                                 .arguments = recording.inputs,
                                 .writes = {recording.inputs[0]}});
  EXPECT_EQ(written_inputs(recording), Slots{0});
  recording.operators[0].is_foreign = true;
  EXPECT_EQ(written_inputs(recording), (Slots{0, 1}));
}

TEST(WrittenInputs, AFillWritesToItsDestination) {
  Recording recording = one_kernel();
  Node& node = recording.nodes[0];
  node.kind = NodeKind::kMemset;
  abi::MemsetNodeParams params{};
  params.dst = kBase + 1024;
  node.image.resize(sizeof params);
  std::memcpy(node.image.data(), &params, sizeof params);
  EXPECT_EQ(written_inputs(recording), Slots{1});
}

// Input 0, that is given away, is named by kernel 0 only; output 0 by kernel 1; kernel 2 names
// none.
LinkedGraph hidden_use() {
  LinkedGraph linked = one_after_the_other({});
  linked.recording.nodes.resize(3);
  linked.recording.edges.push_back({1, 2, {}});
  for (uint32_t n = 0; n < 3; ++n) {
    linked.recording.nodes[n].position = n;
    linked.recording.nodes[n].kind = NodeKind::kKernel;
  }
  return linked;
}

TEST(HiddenUses, WhatAnUnknownKernelWasGivenStaysUntilTheLastOne) {
  LinkedGraph linked = hidden_use();
  plan_memory(linked, {.donated = {{0, 4 * kMiB}}});
  EXPECT_FALSE(linked.placements[0]);
}

TEST(HiddenUses, FrameworkOperatorsKeepNoAddresses) {
  LinkedGraph linked = hidden_use();
  linked.recording.operators = {{.name = "aten::a", .first = 0, .last = 1},
                                {.name = "aten::b", .first = 1, .last = 3}};
  plan_memory(linked, {.donated = {{0, 4 * kMiB}}});
  EXPECT_TRUE(linked.placements[0]);
}

// As aten::_grouped_mm does: the first kernel makes a table of addresses, the next ones use it.
TEST(HiddenUses, AnOperatorsKernelsHandAddressesToEachOther) {
  LinkedGraph linked = hidden_use();
  linked.recording.operators = {{.name = "aten::a", .first = 0, .last = 2},
                                {.name = "aten::b", .first = 2, .last = 3}};
  add_internal(linked, 512, 1, 2);
  const MemoryOptions options{.donated = {{0, 4 * kMiB}}};
  LinkedGraph declared = linked;
  plan_memory(linked, options);
  EXPECT_FALSE(linked.placements[0]);
  EXPECT_EQ(linked.symbols.back().region, 0);
  for (Node& node : declared.recording.nodes) node.has_known_accesses = true;  // no tables
  plan_memory(declared, options);
  EXPECT_TRUE(declared.placements[0]);
}

}  // namespace
}  // namespace pygraph::testing
