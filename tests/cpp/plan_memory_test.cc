// Invariants of the workspace layout, on graphs made by hand; nothing here needs a device.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "pygraph/link.h"

namespace pygraph {
namespace {

LinkedGraph chain(uint32_t nodes) {
  LinkedGraph linked;
  linked.recording.nodes.resize(nodes);
  for (uint32_t n = 0; n + 1 < nodes; ++n) linked.recording.edges.push_back({n, n + 1, {}});
  return linked;
}

void add_internal(LinkedGraph& linked, uint64_t size, uint32_t first, uint32_t last,
                  uint64_t address = 0) {
  Symbol symbol{SymbolKind::kInternal, 0, size, first, last};
  symbol.address_b = address;
  linked.symbols.push_back(symbol);
}

bool overlap(const Symbol& a, const Symbol& b) {
  return a.workspace_offset < b.workspace_offset + b.size &&
         b.workspace_offset < a.workspace_offset + a.size;
}

TEST(PlanMemory, MemoryThatLivesTogetherNeverOverlaps) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    LinkedGraph linked = chain(40);
    for (int i = 0; i < 30; ++i) {
      const uint32_t first = random() % 40;
      add_internal(linked, 1 + random() % 5000, first, first + 1 + random() % 10);
    }
    plan_memory(linked);
    for (size_t i = 0; i < linked.symbols.size(); ++i) {
      const Symbol& a = linked.symbols[i];
      EXPECT_EQ(a.workspace_offset % 512, 0);
      EXPECT_LE(a.workspace_offset + a.size, linked.workspace_size);
      for (size_t j = 0; j < i; ++j) {
        const Symbol& b = linked.symbols[j];
        const bool together = a.first < b.last && b.first < a.last;
        EXPECT_FALSE(together && overlap(a, b));
      }
    }
  }
}

TEST(PlanMemory, MemoryUsedOneAfterTheOtherIsShared) {
  LinkedGraph linked = chain(10);
  for (uint32_t n = 0; n < 10; ++n) add_internal(linked, 4096, n, n + 1);
  plan_memory(linked);
  EXPECT_EQ(linked.workspace_size, 4096);
}

TEST(PlanMemory, MemoryThatWasNeverFreedIsNeededUntilItsLastUse) {
  LinkedGraph linked = chain(6);
  for (uint32_t n = 0; n < 6; ++n) linked.recording.nodes[n].position = n;
  add_internal(linked, 4096, 1, Allocation::kNever);  // a library's workspace, used by 1 and 3
  linked.relocations = {{.node = 1, .symbol = 0}, {.node = 3, .symbol = 0}};
  add_internal(linked, 4096, 3, 4);
  add_internal(linked, 4096, 4, 6);
  plan_memory(linked);
  EXPECT_EQ(linked.workspace_size, 8192);
  EXPECT_FALSE(overlap(linked.symbols[0], linked.symbols[1]));
  EXPECT_TRUE(overlap(linked.symbols[0], linked.symbols[2]));
}

TEST(PlanMemory, ABranchKeepsTheRecordedLayout) {
  LinkedGraph linked = chain(3);
  linked.recording.edges = {{0, 1, {}}, {0, 2, {}}};
  add_internal(linked, 4096, 0, 1, 0x10000);
  add_internal(linked, 4096, 1, 2, 0x20000);  // could share by order of creation, but must not
  add_internal(linked, 4096, 2, 3, 0x10000);  // was shared while recording
  plan_memory(linked);
  EXPECT_EQ(linked.workspace_size, 8192);
  EXPECT_FALSE(overlap(linked.symbols[0], linked.symbols[1]));
  EXPECT_EQ(linked.symbols[0].workspace_offset, linked.symbols[2].workspace_offset);
}

constexpr abi::EdgeData kProgrammatic{.from_port = 1, .to_port = 0, .type = 1, .reserved = {}};

TEST(PlanMemory, KernelsThatMayOverlapShareNothing) {
  LinkedGraph linked = chain(4);
  linked.recording.edges[0].data = kProgrammatic;  // 1 may start before 0 ends; 2 and 3 may not
  for (uint32_t n = 0; n < 4; ++n) add_internal(linked, 4096, n, n + 1);
  plan_memory(linked);
  EXPECT_EQ(linked.workspace_size, 8192);
  EXPECT_FALSE(overlap(linked.symbols[0], linked.symbols[1]));
}

TEST(PlanMemory, LifetimesAreCountedInStepsOfKernelsThatMayOverlap) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    LinkedGraph linked = chain(40);
    std::vector<uint32_t> step(40, 0);
    for (uint32_t n = 1; n < 40; ++n) {
      const bool overlaps = random() % 3 == 0;
      if (overlaps) linked.recording.edges[n - 1].data = kProgrammatic;
      step[n] = step[n - 1] + (overlaps ? 0 : 1);
    }
    std::vector<Symbol> recorded;
    for (int i = 0; i < 30; ++i) {
      const uint32_t first = random() % 40;
      add_internal(linked, 1 + random() % 5000, first,
                   std::min(40U, first + 1 + static_cast<uint32_t>(random() % 10)));
    }
    recorded = linked.symbols;
    plan_memory(linked);
    for (size_t i = 0; i < recorded.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        const bool together = step[recorded[i].first] <= step[recorded[j].last - 1] &&
                              step[recorded[j].first] <= step[recorded[i].last - 1];
        EXPECT_FALSE(together && overlap(linked.symbols[i], linked.symbols[j]));
      }
    }
  }
}

TEST(PlanMemory, AnEdgeOfAnotherKindKeepsTheRecordedLayout) {
  LinkedGraph linked = chain(2);
  linked.recording.edges[0].data = {.from_port = 2, .to_port = 0, .type = 1, .reserved = {}};
  add_internal(linked, 4096, 0, 1, 0x10000);
  add_internal(linked, 4096, 1, 2, 0x20000);
  plan_memory(linked);
  EXPECT_EQ(linked.workspace_size, 8192);
}

constexpr uint64_t kMiB = uint64_t{1} << 20;

struct Use {
  uint32_t first = Allocation::kNever;
  uint32_t end = 0;
};

Use use_of(const LinkedGraph& linked, SymbolKind kind, uint32_t slot) {
  Use use;
  for (const Relocation& relocation : linked.relocations) {
    const Symbol& symbol = linked.symbols[relocation.symbol];
    if (symbol.kind != kind || symbol.slot != slot) continue;
    use.first = std::min(use.first, relocation.node);
    use.end = std::max(use.end, relocation.node + 1);
  }
  return use;
}

// A chain with inputs, outputs and internal memory used at random nodes.
LinkedGraph random_chain(std::mt19937& random) {
  constexpr uint32_t kNodes = 40;
  LinkedGraph linked = chain(kNodes);
  for (uint32_t n = 0; n < kNodes; ++n) linked.recording.nodes[n].position = n;
  linked.recording.inputs.resize(10);
  linked.recording.outputs.resize(10);
  const auto use = [&](uint32_t node) {
    linked.relocations.push_back({node, 0, static_cast<uint32_t>(linked.symbols.size() - 1), 0});
  };
  for (uint32_t slot = 0; slot < 10; ++slot) {
    linked.symbols.push_back({SymbolKind::kInput, slot, (1 + random() % 8) * kMiB});
    for (int i = 0; i < 3; ++i) use(random() % kNodes);
    linked.symbols.push_back({SymbolKind::kOutput, slot, 1 + random() % (8 * kMiB)});
    for (int i = 0; i < 2; ++i) use(random() % kNodes);
  }
  for (int i = 0; i < 30; ++i) {
    const uint32_t first = random() % kNodes;
    add_internal(linked, 1 + random() % (4 * kMiB), first, first + 1 + random() % 5);
  }
  return linked;
}

TEST(PlanMemory, DonatedInputsAreOverwrittenOnlyAfterTheirLastUse) {
  std::mt19937 random(1);
  size_t adopted = 0;
  size_t hosted = 0;
  for (int round = 0; round < 200; ++round) {
    LinkedGraph linked = random_chain(random);
    std::vector<DonatedInput> donated;
    for (uint32_t slot = 0; slot < 10; slot += 2)
      donated.push_back({slot, linked.symbols[2 * slot].size});
    plan_memory(linked, {.donated = donated});
    std::vector<uint32_t> taken;
    for (uint32_t output = 0; output < 10; ++output) {
      if (!linked.donors[output]) continue;
      EXPECT_EQ(linked.donors[output].offset, 0);
      const uint32_t donor = linked.donors[output].input;
      ++adopted;
      EXPECT_EQ(donor % 2, 0);
      EXPECT_EQ(std::ranges::count(taken, donor), 0);
      taken.push_back(donor);
      EXPECT_LE(linked.symbols[2 * output + 1].size, linked.symbols[2 * donor].size);
      EXPECT_LE(use_of(linked, SymbolKind::kInput, donor).end,
                use_of(linked, SymbolKind::kOutput, output).first);
    }
    for (size_t i = 20; i < linked.symbols.size(); ++i) {
      const Symbol& a = linked.symbols[i];
      for (size_t j = 20; j < i; ++j) {
        const Symbol& b = linked.symbols[j];
        const bool together = a.first < b.last && b.first < a.last;
        EXPECT_FALSE(a.region == b.region && together && overlap(a, b));
      }
      if (a.region == 0) {
        EXPECT_LE(a.workspace_offset + a.size, linked.workspace_size);
        continue;
      }
      ++hosted;
      const Region& region = linked.regions[a.region - 1];
      EXPECT_EQ(region.input % 2, 0);
      EXPECT_LE(a.workspace_offset + a.size, region.size);
      EXPECT_LE(region.fallback_offset + region.size, linked.workspace_size_if_kept);
      EXPECT_GE(region.fallback_offset, linked.workspace_size);
      EXPECT_GE(a.first, use_of(linked, SymbolKind::kInput, region.input).end);
      for (uint32_t output = 0; output < 10; ++output) {
        if (linked.donors[output].input != region.input) continue;
        EXPECT_LE(a.last, use_of(linked, SymbolKind::kOutput, output).first);
      }
    }
  }
  EXPECT_GT(adopted, 100);
  EXPECT_GT(hosted, 100);
}

// Inputs that the first node uses, and outputs that the second one does.
LinkedGraph handed_over(std::vector<uint64_t> inputs, std::vector<uint64_t> outputs) {
  LinkedGraph linked = chain(2);
  linked.recording.nodes[1].position = 1;
  linked.recording.inputs.resize(inputs.size());
  linked.recording.outputs.resize(outputs.size());
  const auto add = [&](SymbolKind kind, const std::vector<uint64_t>& sizes, uint32_t node) {
    for (uint32_t slot = 0; slot < sizes.size(); ++slot) {
      linked.relocations.push_back(
          {.node = node, .symbol = static_cast<uint32_t>(linked.symbols.size())});
      linked.symbols.push_back({kind, slot, sizes[slot]});
    }
  };
  add(SymbolKind::kInput, inputs, 0);
  add(SymbolKind::kOutput, outputs, 1);
  MemoryOptions options;
  for (uint32_t slot = 0; slot < inputs.size(); ++slot) {
    options.donated.push_back({slot, inputs[slot]});
  }
  plan_memory(linked, options);
  return linked;
}

TEST(PlanMemory, ALargeOutputLeavesTheSmallerDonatedInputToASmallerOne) {
  const LinkedGraph linked = handed_over({9 * kMiB, 12 * kMiB}, {9 * kMiB, 7 * kMiB});
  EXPECT_EQ(linked.donors[0].input, 1);
  EXPECT_EQ(linked.donors[1].input, 0);
}

TEST(PlanMemory, AnOutputTakesNoLargerDonatedInputThanItMust) {
  const LinkedGraph linked = handed_over({12 * kMiB, 10 * kMiB, 9 * kMiB, 2 * kMiB}, {9 * kMiB});
  EXPECT_EQ(linked.donors[0].input, 2);
}

// How much of the donated input in `slot` outputs take, and how many they are.
struct Filled {
  uint64_t bytes = 0;
  size_t outputs = 0;
};

Filled filled(const LinkedGraph& linked, uint32_t slot) {
  Filled result;
  for (uint32_t output = 0; output < 10; ++output) {
    if (linked.donors[output].input != slot) continue;
    result.bytes += linked.symbols[2 * output + 1].size;
    ++result.outputs;
  }
  return result;
}

TEST(PlanMemory, OutputsThatMayShareLieSideBySideInALargeDonatedInput) {
  std::mt19937 random(1);
  size_t together = 0;
  for (int round = 0; round < 200; ++round) {
    LinkedGraph linked = random_chain(random);
    MemoryOptions options{.sharing = {0, 1, 2, 4, 5, 7, 9}};
    for (uint32_t slot = 0; slot < 10; slot += 3)
      options.donated.push_back({slot, 3 * linked.symbols[2 * slot].size});
    plan_memory(linked, options);
    for (uint32_t output = 0; output < 10; ++output) {
      const Donor& donor = linked.donors[output];
      if (!donor) continue;
      const uint64_t size = linked.symbols[2 * output + 1].size;
      const uint64_t room = 3 * linked.symbols[2 * donor.input].size;
      EXPECT_EQ(donor.offset % 512, 0);
      EXPECT_LE(donor.offset + size, room);
      EXPECT_LE(use_of(linked, SymbolKind::kInput, donor.input).end,
                use_of(linked, SymbolKind::kOutput, output).first);
      const Filled taken = filled(linked, donor.input);
      EXPECT_GE(taken.bytes + 512 * taken.outputs, room / 3 * 2);
      if (taken.outputs == 1) continue;
      ++together;
      EXPECT_NE(std::ranges::find(options.sharing, output), options.sharing.end());
      for (uint32_t other = 0; other < output; ++other) {
        const uint64_t begin = linked.donors[other].offset;
        const uint64_t end = begin + linked.symbols[2 * other + 1].size;
        EXPECT_TRUE(linked.donors[other].input != donor.input || end <= donor.offset ||
                    donor.offset + size <= begin);
      }
    }
    for (size_t i = 20; i < linked.symbols.size(); ++i) {
      const Symbol& internal = linked.symbols[i];
      if (internal.region == 0) continue;
      for (uint32_t output = 0; output < 10; ++output) {
        if (linked.donors[output].input != linked.regions[internal.region - 1].input) continue;
        EXPECT_LE(internal.last, use_of(linked, SymbolKind::kOutput, output).first);
      }
    }
  }
  EXPECT_GT(together, 50);
}

TEST(PlanMemory, AGraphWithBranchesUsesNoDonatedInput) {
  LinkedGraph linked = chain(3);
  linked.recording.edges = {{0, 1, {}}, {0, 2, {}}};
  linked.recording.inputs.resize(1);
  linked.recording.outputs.resize(1);
  linked.symbols.push_back({SymbolKind::kInput, 0, 4 * kMiB});
  linked.symbols.push_back({SymbolKind::kOutput, 0, 4 * kMiB});
  plan_memory(linked, {.donated = {{0, 4 * kMiB}}});
  EXPECT_EQ(linked.donors, std::vector<Donor>(1));
}

TEST(PlanMemory, AGraphWithoutInternalMemoryNeedsNone) {
  LinkedGraph linked = chain(3);
  plan_memory(linked);
  EXPECT_EQ(linked.workspace_size, 0);
}

TEST(PlanMemory, BlocksHoldWhatTheyWereMadeForAndSmallerOnes) {
  std::mt19937 random(1);
  size_t blocks = 0;
  size_t guests = 0;
  for (int round = 0; round < 200; ++round) {
    LinkedGraph linked = chain(40);
    for (int i = 0; i < 30; ++i) {
      const uint32_t first = random() % 40;
      add_internal(linked, 1 + random() % 5000, first, first + 1 + random() % 10);
    }
    const uint64_t smallest = 2000 + random() % 2000;
    plan_memory(linked, {.smallest_block = smallest});
    EXPECT_EQ(linked.workspace_size, linked.workspace_size_if_kept);
    std::vector<uint64_t> largest(linked.regions.size(), 0);
    for (size_t i = 0; i < linked.symbols.size(); ++i) {
      const Symbol& a = linked.symbols[i];
      EXPECT_TRUE(a.region > 0 || a.size < smallest);
      const uint64_t room =
          a.region == 0 ? linked.workspace_size : linked.regions[a.region - 1].size;
      if (a.region > 0) {
        largest[a.region - 1] = std::max(largest[a.region - 1], a.size);
        guests += a.size < smallest ? 1 : 0;
      }
      EXPECT_EQ(a.workspace_offset % 512, 0);
      EXPECT_LE(a.workspace_offset + a.size, room);
      for (size_t j = 0; j < i; ++j) {
        const Symbol& b = linked.symbols[j];
        const bool together = a.first < b.last && b.first < a.last;
        EXPECT_FALSE(together && a.region == b.region && overlap(a, b));
      }
    }
    blocks += linked.regions.size();
    for (size_t r = 0; r < linked.regions.size(); ++r) {
      EXPECT_EQ(linked.regions[r].input, Region::kOwnBlock);
      EXPECT_EQ(linked.regions[r].size, largest[r]);
    }
  }
  EXPECT_GT(blocks, 200);
  EXPECT_GT(guests, 200);
}

TEST(PlanMemory, BlocksLieInOutputsThatAreUsedLater) {
  std::mt19937 random(1);
  size_t in_outputs = 0;
  size_t larger = 0;
  for (int round = 0; round < 200; ++round) {
    LinkedGraph linked = random_chain(random);
    std::vector<DonatedInput> donated;
    for (uint32_t slot = 0; slot < 10; slot += 2)
      donated.push_back({slot, linked.symbols[2 * slot].size});
    plan_memory(linked, {.donated = donated, .smallest_block = kMiB});
    std::vector<uint32_t> taken;
    for (uint32_t r = 0; r < linked.regions.size(); ++r) {
      const Region& region = linked.regions[r];
      if (region.output == Region::kNoOutput) continue;
      ++in_outputs;
      const uint64_t size = linked.symbols[2 * region.output + 1].size;
      EXPECT_EQ(region.input, Region::kOwnBlock);
      EXPECT_FALSE(linked.donors[region.output]);
      EXPECT_EQ(std::ranges::count(taken, region.output), 0);
      taken.push_back(region.output);
      EXPECT_GE(region.size, size);
      EXPECT_LE(region.size, size + size / 2 + 2);
      larger += region.size > size ? 1 : 0;
      for (size_t i = 20; i < linked.symbols.size(); ++i) {
        const Symbol& symbol = linked.symbols[i];
        if (symbol.region != r + 1) continue;
        EXPECT_LE(symbol.workspace_offset + symbol.size, region.size);
        EXPECT_LE(symbol.last, use_of(linked, SymbolKind::kOutput, region.output).first);
      }
    }
  }
  EXPECT_GT(in_outputs, 100);
  EXPECT_GT(larger, 10);
}

// Input 0 is used by node 0, output 0 by node 1, and internal memory by each of them.
LinkedGraph one_after_the_other(const abi::EdgeData& edge) {
  LinkedGraph linked = chain(2);
  linked.recording.nodes[1].position = 1;
  linked.recording.edges[0].data = edge;
  linked.recording.inputs.resize(1);
  linked.recording.outputs.resize(1);
  linked.symbols.push_back({SymbolKind::kInput, 0, 4 * kMiB});
  linked.symbols.push_back({SymbolKind::kOutput, 0, 4 * kMiB});
  linked.relocations = {{.node = 0, .symbol = 0}, {.node = 1, .symbol = 1}};
  add_internal(linked, 3 * kMiB, 0, 1);
  add_internal(linked, 2 * kMiB, 1, 2);
  return linked;
}

// Input 0 is used by node 0, input 1 by node 2, output 0 and internal memory from node `first` on.
LinkedGraph with_two_inputs(uint32_t first) {
  LinkedGraph linked = chain(4);
  for (uint32_t n = 0; n < 4; ++n) linked.recording.nodes[n].position = n;
  linked.recording.inputs.resize(2);
  linked.recording.outputs.resize(1);
  linked.symbols.push_back({SymbolKind::kInput, 0, 4 * kMiB});
  linked.symbols.push_back({SymbolKind::kInput, 1, 2 * kMiB});
  linked.symbols.push_back({SymbolKind::kOutput, 0, 4 * kMiB});
  linked.relocations = {{.node = 0, .symbol = 0}, {.node = 2, .symbol = 1}};
  linked.relocations.push_back({.node = first, .symbol = 2});
  add_internal(linked, 2 * kMiB, 1, 2);
  return linked;
}

TEST(PlanMemory, AViewKeepsWhatItLiesInUntilItsLastUse) {
  const MemoryOptions alone{.donated = {{.slot = 0, .size = 4 * kMiB}}};
  const MemoryOptions viewed{.donated = {{.slot = 0, .size = 4 * kMiB, .views = {1}}}};
  LinkedGraph linked = with_two_inputs(2);
  plan_memory(linked, alone);
  EXPECT_EQ(linked.donors[0].input, 0);
  EXPECT_EQ(linked.symbols[3].region, 1);
  linked = with_two_inputs(2);
  plan_memory(linked, viewed);
  EXPECT_FALSE(linked.donors[0]);
  EXPECT_EQ(linked.symbols[3].region, 0);
  EXPECT_TRUE(linked.donated.empty());
  linked = with_two_inputs(3);
  plan_memory(linked, viewed);
  EXPECT_EQ(linked.donors[0].input, 0);
  ASSERT_EQ(linked.donated.size(), 1);
  EXPECT_EQ(linked.donated[0].views, std::vector<uint32_t>{1});
}

TEST(PlanMemory, AnOutputTakesOverNothingThatAKernelBesideItUses) {
  const MemoryOptions donated{.donated = {{0, 4 * kMiB}}};
  LinkedGraph serial = one_after_the_other({});
  plan_memory(serial, donated);
  EXPECT_EQ(serial.donors[0].input, 0);
  LinkedGraph overlapping = one_after_the_other(kProgrammatic);
  plan_memory(overlapping, donated);
  EXPECT_FALSE(overlapping.donors[0]);
  EXPECT_EQ(overlapping.symbols[3].region, 0);  // nor is it in the input
}

TEST(PlanMemory, NoBlockLiesInAnOutputThatAKernelBesideItUses) {
  const MemoryOptions blocks{.smallest_block = 3 * kMiB};
  LinkedGraph serial = one_after_the_other({});
  plan_memory(serial, blocks);
  ASSERT_EQ(serial.regions.size(), 1);
  EXPECT_EQ(serial.regions[0].output, 0);
  LinkedGraph overlapping = one_after_the_other(kProgrammatic);
  plan_memory(overlapping, blocks);
  ASSERT_EQ(overlapping.regions.size(), 1);
  EXPECT_EQ(overlapping.regions[0].output, Region::kNoOutput);
}

TEST(PlanMemory, ABlockLiesInTheOutputThatItWastesLeastOf) {
  LinkedGraph linked = chain(4);
  for (uint32_t n = 0; n < 4; ++n) linked.recording.nodes[n].position = n;
  linked.recording.outputs.resize(3);
  for (uint32_t slot = 0; slot < 3; ++slot) {
    linked.symbols.push_back({SymbolKind::kOutput, slot, (3 + slot) * kMiB});
    linked.relocations.push_back({.node = slot == 2 ? 1U : 3U, .symbol = slot});
  }
  add_internal(linked, 4 * kMiB, 0, 3);  // output 0 is smaller, output 2 is used meanwhile
  plan_memory(linked, {.smallest_block = 4 * kMiB});
  ASSERT_EQ(linked.regions.size(), 1);
  EXPECT_EQ(linked.regions[0].output, 1);
  EXPECT_EQ(linked.regions[0].size, 4 * kMiB);
  EXPECT_NE(link_map(linked).find("in output1"), std::string::npos);
}

TEST(PlanMemory, LargeMemoryUsedOneAfterTheOtherSharesABlock) {
  LinkedGraph linked = chain(10);
  for (uint32_t n = 0; n < 10; ++n) add_internal(linked, kMiB - 512 * n, n, n + 1);
  add_internal(linked, 512, 0, 10);
  plan_memory(linked, {.smallest_block = kMiB / 2});
  ASSERT_EQ(linked.regions.size(), 1);
  EXPECT_EQ(linked.regions[0].size, kMiB);
  EXPECT_EQ(linked.workspace_size, 512);
}

TEST(PlanMemory, RegionsInInputsMoveWhereTheCallKeepsThemBlocksDoNot) {
  LinkedGraph linked = chain(4);
  linked.recording.inputs.resize(1);
  linked.symbols.push_back({SymbolKind::kInput, 0, 2 * kMiB});
  linked.relocations.push_back({.node = 0, .symbol = 0});
  add_internal(linked, 4 * kMiB, 0, 2);
  add_internal(linked, kMiB, 2, 3);  // fits in the input, which is dead by then
  add_internal(linked, 512, 0, 4);
  plan_memory(linked, {.donated = {{0, 2 * kMiB}}, .smallest_block = 4 * kMiB});
  ASSERT_EQ(linked.regions.size(), 2);
  EXPECT_EQ(linked.regions[0].input, 0);
  EXPECT_EQ(linked.regions[1].input, Region::kOwnBlock);
  EXPECT_EQ(linked.symbols[1].region, 2);
  EXPECT_EQ(linked.symbols[2].region, 1);
  EXPECT_EQ(linked.symbols[3].region, 0);
  EXPECT_EQ(linked.workspace_size, 512);
  EXPECT_EQ(linked.workspace_size_if_kept, 512 + 2 * kMiB);
}

}  // namespace
}  // namespace pygraph
