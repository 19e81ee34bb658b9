// Donated inputs: what takes their place, and when.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "planned_graphs.h"

namespace pygraph::testing {
namespace {

TEST(Donation, DonatedInputsAreOverwrittenOnlyAfterTheirLastUse) {
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
      if (!linked.placements[output]) continue;
      EXPECT_EQ(linked.placements[output].offset, 0);
      const uint32_t donor = linked.placements[output].input;
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
        if (linked.placements[output].input != region.input) continue;
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

TEST(Donation, ALargeOutputLeavesTheSmallerDonatedInputToASmallerOne) {
  const LinkedGraph linked = handed_over({9 * kMiB, 12 * kMiB}, {9 * kMiB, 7 * kMiB});
  EXPECT_EQ(linked.placements[0].input, 1);
  EXPECT_EQ(linked.placements[1].input, 0);
}

TEST(Donation, AnOutputTakesNoLargerDonatedInputThanItMust) {
  const LinkedGraph linked = handed_over({12 * kMiB, 10 * kMiB, 9 * kMiB, 2 * kMiB}, {9 * kMiB});
  EXPECT_EQ(linked.placements[0].input, 2);
}

TEST(Donation, AnOutputTakesAnInputOfTwiceItsSizeThatNoneElseTakes) {
  const LinkedGraph linked = handed_over({9 * kMiB, 4 * kMiB, 8 * kMiB}, {2 * kMiB, 4 * kMiB});
  EXPECT_EQ(linked.placements[0].input, OutputPlacement::kNone);  // the second one takes it
  EXPECT_EQ(linked.placements[1].input, 1);
  const LinkedGraph later = handed_over({9 * kMiB, 4 * kMiB}, {2 * kMiB, 5 * kMiB});
  EXPECT_EQ(later.placements[0].input, 1);
  EXPECT_EQ(later.placements[1].input, 0);
}

// How much of the donated input in `slot` outputs take, and how many they are.
struct Filled {
  uint64_t bytes = 0;
  size_t outputs = 0;
};

Filled filled(const LinkedGraph& linked, uint32_t slot) {
  Filled result;
  for (uint32_t output = 0; output < 10; ++output) {
    if (linked.placements[output].input != slot) continue;
    result.bytes += linked.symbols[2 * output + 1].size;
    ++result.outputs;
  }
  return result;
}

TEST(Donation, OutputsThatMayShareLieSideBySideInALargeDonatedInput) {
  std::mt19937 random(1);
  size_t together = 0;
  for (int round = 0; round < 200; ++round) {
    LinkedGraph linked = random_chain(random);
    MemoryOptions options{.sharing = {0, 1, 2, 4, 5, 7, 9}};
    for (uint32_t slot = 0; slot < 10; slot += 3)
      options.donated.push_back({slot, 3 * linked.symbols[2 * slot].size});
    plan_memory(linked, options);
    for (uint32_t output = 0; output < 10; ++output) {
      const OutputPlacement& donor = linked.placements[output];
      if (!donor) continue;
      const uint64_t size = linked.symbols[2 * output + 1].size;
      const uint64_t room = 3 * linked.symbols[2 * donor.input].size;
      EXPECT_EQ(donor.offset % 512, 0);
      EXPECT_LE(donor.offset + size, room);
      EXPECT_LE(use_of(linked, SymbolKind::kInput, donor.input).end,
                use_of(linked, SymbolKind::kOutput, output).first);
      const Filled taken = filled(linked, donor.input);
      EXPECT_GE(taken.bytes + 512 * taken.outputs, room / 2);
      if (taken.outputs == 1) continue;
      ++together;
      EXPECT_NE(std::ranges::find(options.sharing, output), options.sharing.end());
      for (uint32_t other = 0; other < output; ++other) {
        const uint64_t begin = linked.placements[other].offset;
        const uint64_t end = begin + linked.symbols[2 * other + 1].size;
        EXPECT_TRUE(linked.placements[other].input != donor.input || end <= donor.offset ||
                    donor.offset + size <= begin);
      }
    }
    for (size_t i = 20; i < linked.symbols.size(); ++i) {
      const Symbol& internal = linked.symbols[i];
      if (internal.region == 0) continue;
      for (uint32_t output = 0; output < 10; ++output) {
        if (linked.placements[output].input != linked.regions[internal.region - 1].input) continue;
        EXPECT_LE(internal.last, use_of(linked, SymbolKind::kOutput, output).first);
      }
    }
  }
  EXPECT_GT(together, 50);
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

TEST(Donation, AViewKeepsWhatItLiesInUntilItsLastUse) {
  const MemoryOptions alone{.donated = {{.slot = 0, .size = 4 * kMiB}}};
  const MemoryOptions viewed{.donated = {{.slot = 0, .size = 4 * kMiB, .views = {1}}}};
  LinkedGraph linked = with_two_inputs(2);
  plan_memory(linked, alone);
  EXPECT_EQ(linked.placements[0].input, 0);
  EXPECT_EQ(linked.symbols[3].region, 1);
  linked = with_two_inputs(2);
  plan_memory(linked, viewed);
  EXPECT_FALSE(linked.placements[0]);
  EXPECT_EQ(linked.symbols[3].region, 0);
  EXPECT_TRUE(linked.donated.empty());
  linked = with_two_inputs(3);
  plan_memory(linked, viewed);
  EXPECT_EQ(linked.placements[0].input, 0);
  ASSERT_EQ(linked.donated.size(), 1);
  EXPECT_EQ(linked.donated[0].views, std::vector<uint32_t>{1});
}

TEST(Donation, AnOutputTakesOverNothingThatAKernelBesideItUses) {
  const MemoryOptions donated{.donated = {{0, 4 * kMiB}}};
  LinkedGraph serial = one_after_the_other({});
  plan_memory(serial, donated);
  EXPECT_EQ(serial.placements[0].input, 0);
  LinkedGraph overlapping = one_after_the_other(kProgrammatic);
  plan_memory(overlapping, donated);
  EXPECT_FALSE(overlapping.placements[0]);
  EXPECT_EQ(overlapping.symbols[3].region, 0);  // nor is it in the input
}

TEST(Donation, RegionsInInputsMoveWhereTheCallKeepsThemBlocksDoNot) {
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
}  // namespace pygraph::testing
