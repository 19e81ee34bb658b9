// Invariants of the workspace layout.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "planned_graphs.h"

namespace pygraph::testing {
namespace {

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
      EXPECT_FALSE(linked.placements[region.output]);
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

}  // namespace
}  // namespace pygraph::testing
