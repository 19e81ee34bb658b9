// A fixed part of what the fuzzer does, and programs that the engine got wrong once.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <optional>
#include <set>
#include <sstream>

#include "campaign.h"
#include "check_plan.h"
#include "reduce.h"

// Where the driver refuses to take something back, it stays. What must not stay, the tests look at.
// NOLINTNEXTLINE(bugprone-reserved-identifier)
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() {
  return "detect_leaks=0";
}

namespace pygraph::fuzz {
namespace {

// Sanitizers run fewer.
uint64_t programs_per_test() {
  const char* count = std::getenv("PYGRAPH_FUZZ_PROGRAMS");
  return count != nullptr ? std::strtoull(count, nullptr, 10) : 60;
}

struct Fixture {
  Machine machine;
  Arena arena;
  Tally tally;
};

class EngineFuzzTest : public ::testing::TestWithParam<uint64_t>, protected Fixture {};
class EngineFaultTest : public ::testing::Test, protected Fixture {};

TEST_P(EngineFuzzTest, RandomProgramsGiveTheirBytes) {
  const uint64_t count = programs_per_test();
  for (uint64_t seed = GetParam() * 1000; seed < GetParam() * 1000 + count; ++seed) {
    const auto found = find_fault(machine, arena, generate(seed), tally);
    ASSERT_FALSE(found) << "seed " << seed << ": " << *found;
  }
  EXPECT_GT(tally.replays, count);
  EXPECT_LT(tally.refused, count / 4 + 1);
  EXPECT_GE(tally.with_forks, count / 12);  // few programs under sanitizers
}

INSTANTIATE_TEST_SUITE_P(Seeds, EngineFuzzTest, ::testing::Range<uint64_t>(1, 5));

// First, last, and one call in between of each function that some programs' lives call.
TEST_F(EngineFaultTest, EachFunctionOfTheDriverMayFail) {
  std::set<std::string> failed;
  for (uint64_t seed = 0; seed < 1 + programs_per_test() / 30; ++seed) {
    const Program program = generate(seed);
    for (const auto& [symbol, count] : calls_of(machine, arena, program)) {
      for (const int call : std::set<int>{1, (count + 1) / 2, count}) {
        const Fault fault{symbol, call, abi::kOutOfMemory};
        EXPECT_NO_THROW(live(machine, arena, program, tally, &fault))
            << "seed " << seed << ", call " << call << " of " << symbol;
      }
      failed.insert(symbol);
    }
  }
  EXPECT_GT(failed.size(), 40);
}

TEST(FuzzedProgramTest, ProgramsOnOneStreamDoNotDependOnForks) {
  size_t forked = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const Program program = generate(seed);
    if (std::ranges::any_of(program.steps, &Step::stream)) {
      ++forked;
    } else {
      EXPECT_EQ(to_text(program), to_text(generate(seed, {.forks = false}))) << seed;
    }
  }
  EXPECT_GT(forked, 20);
}

class KeptProgramTest : public EngineFuzzTest {};

std::string kept_program(uint64_t number) {
  std::ifstream file(std::string(PYGRAPH_KEPT_PROGRAMS) + "/" + std::to_string(number) + ".txt");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST_P(KeptProgramTest, GivesItsBytes) {
  const Program program = from_text(kept_program(GetParam()));
  ASSERT_FALSE(program.steps.empty());
  const auto found = find_fault(machine, arena, program, tally);
  EXPECT_FALSE(found) << *found;
}

INSTANTIATE_TEST_SUITE_P(Programs, KeptProgramTest,
                         ::testing::Range<uint64_t>(1, 1 + PYGRAPH_KEPT_COUNT));

TEST(FuzzedProgramTest, TextSaysAllOfAProgram) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const std::string text = to_text(generate(seed));
    EXPECT_EQ(to_text(from_text(text)), text);
  }
}

TEST(FuzzedProgramTest, WhatIsAProgramStaysWhatItIs) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Program program = generate(seed);
    const std::string text = to_text(program);
    normalise(program);
    EXPECT_EQ(to_text(program), text) << seed;
  }
}

TEST(FuzzedProgramTest, ReductionKeepsWhatFails) {
  const auto has_overlap = [](const Program& program) {
    return std::ranges::any_of(program.steps, &Step::overlaps);
  };
  uint64_t seed = 0;
  while (!has_overlap(generate(seed))) ++seed;
  const Program small = reduce(generate(seed), has_overlap);
  EXPECT_TRUE(has_overlap(small));
  EXPECT_EQ(small.steps.size(), 2);
  EXPECT_TRUE(small.values.empty());
}

// Links the program and checks its plan, which `change` may make wrong. Nothing if it is refused.
std::optional<bool> is_plan_right(Machine& machine, const Program& program,
                                  const std::function<void(LinkedGraph&)>& change) {
  machine.begin(program);
  const Recorded recorded = machine.record(program);
  try {
    LinkedGraph linked = link(machine.driver(), recorded.recordings[0], recorded.recordings[1], {},
                              program.lanes, {.cached = [&] { return machine.foreign_memory(); }});
    change(linked);
    check_plan(program, recorded, linked);
  } catch (const NotRelocatable&) {
    return {};
  } catch (const Wrong&) {
    return false;
  }
  return true;
}

// The oracle notices a plan that is wrong, whether or not values would show it.
TEST(FuzzedProgramTest, AMovedAllocationIsFoundInThePlan) {
  Machine machine;
  size_t found = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const Program program = generate(seed);
    const auto is_right = is_plan_right(machine, program, [](LinkedGraph&) {});
    if (!is_right) continue;
    EXPECT_TRUE(*is_right) << seed;
    const auto move = [](LinkedGraph& linked) {
      for (Symbol& symbol : linked.symbols) symbol.workspace_offset = 0;
    };
    if (!*is_plan_right(machine, program, move)) ++found;
  }
  EXPECT_GT(found, 25);
}

// Each stream goes on without waiting for the others.
TEST(FuzzedProgramTest, MissingJoinsAreFoundInThePlan) {
  Machine machine;
  size_t forked = 0;
  size_t found = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const Program program = generate(seed);
    if (std::ranges::none_of(program.steps, &Step::stream)) continue;
    const auto unjoin = [&](LinkedGraph& linked) {
      const auto stream_of = [&](uint32_t node) {
        return program.steps[linked.recording.nodes[node].position].stream;
      };
      std::erase_if(linked.recording.edges,
                    [&](const Edge& edge) { return stream_of(edge.from) != stream_of(edge.to); });
    };
    const auto is_right = is_plan_right(machine, program, [](LinkedGraph&) {});
    if (!is_right) continue;
    EXPECT_TRUE(*is_right) << seed;
    ++forked;
    if (!*is_plan_right(machine, program, unjoin)) ++found;
  }
  EXPECT_GT(found, forked / 2);
}

}  // namespace
}  // namespace pygraph::fuzz
