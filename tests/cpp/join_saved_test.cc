// Saved tensors that lie side by side, so that gradients find room in their memory.
#include "pygraph/join_saved.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "pygraph/alignment.h"

namespace pygraph::testing {
namespace {

constexpr uint64_t operator""_MiB(long double count) {
  return static_cast<uint64_t>(count * (1 << 20));
}

using Groups = std::vector<std::vector<uint32_t>>;

TEST(JoinSaved, TensorsInARowAreAsLargeAsAGradient) {
  const std::vector<uint64_t> saved(9, 1.5_MiB);
  EXPECT_EQ(join_saved(saved, {6.0_MiB, 6.0_MiB}), (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}}));
}

TEST(JoinSaved, NothingIsJoinedWithoutGradients) {
  EXPECT_TRUE(join_saved(std::vector<uint64_t>(8, 1.5_MiB), {}).empty());
}

TEST(JoinSaved, TensorsThatServeAGradientAloneStayAlone) {
  const std::vector<uint64_t> saved(4, 3.0_MiB);  // each is as large as a gradient
  EXPECT_TRUE(join_saved(saved, std::vector<uint64_t>(4, 2.25_MiB)).empty());
  EXPECT_TRUE(join_saved(saved, std::vector<uint64_t>(4, 3.0_MiB)).empty());
  EXPECT_TRUE(join_saved({{4.0_MiB, 4.0_MiB}}, {2.0_MiB, 2.25_MiB}).empty());  // twice as large
  EXPECT_TRUE(join_saved({{12.0_MiB, 12.0_MiB}}, std::vector<uint64_t>(12, 2.0_MiB)).empty());
}

TEST(JoinSaved, WhatServesAloneIsLeftOutOfARow) {
  const std::vector<uint64_t> saved{1.5_MiB, 3.0_MiB, 1.5_MiB, 1.5_MiB, 1.5_MiB};
  EXPECT_EQ(join_saved(saved, {6.0_MiB, 2.25_MiB}), (Groups{{0, 2, 3, 4}}));
}

TEST(JoinSaved, TensorsThatAreFarApartAreNotJoined) {
  std::vector<uint64_t> saved(22, 4.0_MiB);
  std::vector<uint64_t> gradients(20, 4.0_MiB);
  gradients.push_back(6.0_MiB);
  saved.front() = saved.back() = 3.0_MiB;
  EXPECT_TRUE(join_saved(saved, gradients).empty());
  saved.push_back(3.0_MiB);
  EXPECT_EQ(join_saved(saved, gradients), (Groups{{21, 22}}));
}

TEST(JoinSaved, TheRowThatFitsBestIsTaken) {
  const std::vector<uint64_t> saved{3.7_MiB, 3.7_MiB, 1.5_MiB, 1.5_MiB, 1.5_MiB, 1.5_MiB};
  EXPECT_EQ(join_saved(saved, {6.0_MiB}), (Groups{{2, 3, 4, 5}}));
}

TEST(JoinSaved, ABlockIsAtMostAQuarterLargerThanItsGradient) {
  EXPECT_TRUE(join_saved(std::vector<uint64_t>(4, 4.0_MiB), {6.25_MiB}).empty());
  EXPECT_EQ(join_saved(std::vector<uint64_t>(4, 3.5_MiB), {6.25_MiB}), (Groups{{0, 1}}));
}

TEST(JoinSaved, SmallTensorsAndSmallGradientsTakeNoPart) {
  EXPECT_TRUE(join_saved(std::vector<uint64_t>(16, 0.5_MiB), {2.0_MiB}).empty());
  EXPECT_TRUE(join_saved(std::vector<uint64_t>(4, 4.0_MiB), {0.5_MiB}).empty());
}

TEST(JoinSaved, ALlamasTensorsServeItsGradients) {
  std::vector<uint64_t> saved;
  for (int layer = 0; layer < 12; ++layer) {
    for (const uint64_t bytes : {1.5_MiB, 1.5_MiB, 1.5_MiB, 1.5_MiB, 1.5_MiB, 1.5_MiB, 4.0_MiB,
                                 4.0_MiB, 4.0_MiB, 1.5_MiB, 1.5_MiB}) {
      saved.push_back(bytes);
    }
  }
  saved.push_back(62.5_MiB);
  std::vector<uint64_t> gradients{93.75_MiB, 93.75_MiB};
  for (int layer = 0; layer < 12; ++layer) {
    gradients.insert(gradients.end(), 4, 2.25_MiB);
    gradients.insert(gradients.end(), 3, 6.0_MiB);
  }
  const Groups groups = join_saved(saved, gradients);
  const auto joined = std::ranges::count(groups, size_t{4}, &std::vector<uint32_t>::size);
  EXPECT_EQ(joined, 24);
  for (const auto& group : groups) {
    for (const uint32_t i : group) EXPECT_EQ(saved[i], 1.5_MiB);
  }
}

// Groups are disjoint, ascending, of a bounded size, and each as large as one of the gradients.
TEST(JoinSaved, RandomSizes) {
  std::mt19937 random(3);
  std::uniform_int_distribution<uint64_t> size(1, 24 << 20);
  std::uniform_int_distribution<uint64_t> small(1, 3 << 20);
  size_t joined = 0;
  for (int round = 0; round < 2000; ++round) {
    std::vector<uint64_t> saved(random() % 40);
    std::vector<uint64_t> gradients(random() % 20);
    for (uint64_t& bytes : saved) bytes = random() % 4 == 0 ? size(random) : small(random);
    for (uint64_t& bytes : gradients) bytes = random() % 2 == 0 ? size(random) : small(random);
    std::vector<uint32_t> members;
    for (const auto& group : join_saved(saved, gradients)) {
      ++joined;
      EXPECT_TRUE(group.size() >= 2 && group.size() <= 8);
      EXPECT_TRUE(std::ranges::is_sorted(group));
      EXPECT_LT(group.back() - group.front(), 16U);
      uint64_t end = 0;
      for (const uint32_t i : group) {
        EXPECT_GE(saved[i], kSmallestDonation);
        end = align_up(end) + saved[i];
        members.push_back(i);
      }
      EXPECT_LE(end, kLargestJoinedBlock);
      EXPECT_TRUE(std::ranges::any_of(
          gradients, [&](uint64_t bytes) { return end >= bytes && end / 5 <= bytes / 4; }));
    }
    std::ranges::sort(members);
    EXPECT_EQ(std::ranges::adjacent_find(members), members.end());
  }
  EXPECT_GT(joined, 500U);
}

}  // namespace
}  // namespace pygraph::testing
