// Words that differ between the recordings and are no address of a symbol: computed from addresses,
// or padding.
#include <algorithm>
#include <array>
#include <functional>

#include "test_device.h"

namespace pygraph::testing {
namespace {

constexpr unsigned kCount = 256;
constexpr uint64_t kBytes = kCount * sizeof(float);

class ComputedWordsTest : public DeviceTest {
 protected:
  // A word that `compute` makes of the addresses of four inputs, in the middle of a struct.
  std::string in_struct(const std::function<uint64_t(std::span<const uint64_t>)>& compute) {
    return outcome([&](Session& s) {
      device.add_one_struct(s.stream, s.inputs[0], compute(s.inputs), s.inputs[1], kCount);
      return std::vector<uint64_t>{};
    });
  }
  // As a parameter of its own.
  std::string as_parameter(const std::function<uint64_t(std::span<const uint64_t>)>& compute) {
    return outcome([&](Session& s) {
      device.add(s.stream, s.inputs[0], s.inputs[1], compute(s.inputs), kCount);
      return std::vector<uint64_t>{};
    });
  }
  std::string outcome(const Computation& computation) {
    TwoRecordings recordings = record_twice(device, {kBytes, 3 * kBytes, kBytes, 100}, computation);
    spaces = {recordings.space_a->range(), recordings.space_b->range()};
    recordings.first.operators[0].is_foreign = is_foreign;
    recordings.second.operators[0].is_foreign = is_foreign;
    recordings.second.inner_operators = inner;
    try {
      const LinkedGraph linked = recordings.link(driver);
      return std::to_string(linked.noise_words) + " noise, " +
             std::to_string(linked.unexplained_words) + " unexplained";
    } catch (const NotRelocatable& error) {
      return "refused: " + std::string(error.what());
    }
  }
  static void expect_refused(const std::string& outcome) {
    EXPECT_EQ(outcome.find("refused: operator aten::test, node 0, kernel add"), 0) << outcome;
  }
  // In a struct, where half an address, say, may lie in the stand-ins of the other recording: it
  // is left to the verification then.
  void expect_found(const std::function<uint64_t(std::span<const uint64_t>)>& compute) {
    uint64_t word = 0;  // of the second recording
    const std::string found = in_struct([&](auto in) { return word = compute(in); });
    const bool is_stand_in =
        std::ranges::any_of(spaces, [&](const Range& space) { return space.contains(word); });
    if (is_stand_in) {
      EXPECT_EQ(found, "0 noise, 1 unexplained");
    } else {
      expect_refused(found);
    }
  }
  std::array<Range, 2> spaces;  // of the recordings
  bool is_foreign = false;      // whether the operator is not PyTorch's own
  std::vector<Operator> inner;  // of PyTorch's own, that it calls
};

TEST_F(ComputedWordsTest, DifferencesOfAddresses) {
  is_foreign = true;
  for (const uint64_t scale : {1, 2, 4, 8, 16}) {
    expect_refused(in_struct([&](auto in) { return (in[2] - in[0]) / scale; }));
    expect_refused(in_struct([&](auto in) { return (in[3] - in[1]) / scale; }));
    expect_refused(in_struct([&](auto in) {
      return static_cast<uint64_t>(static_cast<int64_t>(in[0] - in[2]) /
                                   static_cast<int64_t>(scale));
    }));
  }
}

TEST_F(ComputedWordsTest, AddressesInOtherUnits) {
  for (const uint64_t scale : {2, 4, 8, 16}) {
    expect_found([&](auto in) { return in[2] / scale; });
  }
  expect_found([](auto in) { return -in[0]; });
  is_foreign = true;
  expect_found([](auto in) { return in[0] + in[2]; });
}

// Sizes that an earlier function has left on the stack differ like addresses of small buffers.
TEST_F(ComputedWordsTest, PyTorchsOwnOperatorsComputeNoDifferences) {
  EXPECT_EQ(in_struct([&](auto in) { return (in[2] - in[0]) / 4; }), "1 noise, 0 unexplained");
}

// Garbage differs by powers of two; so would addresses if both recordings began a round distance
// apart.
TEST_F(ComputedWordsTest, NumbersThatDifferByPowersOfTwoAreNoAddresses) {
  for (int bit = 20; bit < 44; ++bit) {
    for (const uint64_t sign : {uint64_t{1}, ~uint64_t{0}}) {
      uint64_t number = 0;
      const auto garbage = [&](auto in) {
        number = number == 0 ? in[0] >> 38 << 38 : number + (sign << bit);
        return number;
      };
      EXPECT_EQ(in_struct(garbage).find("refused"), std::string::npos) << bit;
    }
  }
}

TEST_F(ComputedWordsTest, AParameterOfItsOwnIsUsed) {
  for (const bool foreign : {false, true}) {
    is_foreign = foreign;
    expect_refused(as_parameter([](auto in) { return in[2] - 64; }));  // before the allocation
    expect_refused(as_parameter([](auto in) { return in[3] + 200; }));
    const std::array blocks{device.allocate(64), device.allocate(64)};  // one per recording
    size_t next = 0;
    expect_refused(as_parameter([&](auto) { return blocks.at(next++); }));
  }
}

// Functors of PyTorch's kernels are partly padding; others may count their calls.
TEST_F(ComputedWordsTest, OnlyPyTorchsOwnParametersMayHoldGarbage) {
  uint64_t counter = 0;
  EXPECT_EQ(as_parameter([&](auto) { return ++counter; }), "1 noise, 0 unexplained");
  is_foreign = true;
  expect_refused(as_parameter([](auto in) { return in[2] - in[0]; }));
  expect_refused(as_parameter([&](auto) { return ++counter; }));
}

// As cuBLAS's kernels have, in a region that torch.compile has compiled.
TEST_F(ComputedWordsTest, OperatorsThatOthersCallMayAsWell) {
  uint64_t counter = 0;
  const auto count = [&](auto) { return ++counter; };
  is_foreign = true;
  inner = {{.name = "aten::addmm", .last = 1}};
  EXPECT_EQ(as_parameter(count), "1 noise, 0 unexplained");
  inner.front().is_called_by_custom = true;
  expect_refused(as_parameter(count));
  inner = {{.name = "aten::addmm", .last = 1, .is_foreign = true}};  // it calls a custom one
  expect_refused(as_parameter(count));
  inner = {{.name = "aten::addmm", .first = 1, .last = 2}};  // of another kernel
  expect_refused(as_parameter(count));
}

TEST_F(ComputedWordsTest, NumbersBehindTheLastWholeWordAreCompared) {
  const auto launched_with = [&](const auto& compute) {
    return outcome([&](Session& s) {
      uint64_t address = s.inputs[1];
      auto count = static_cast<unsigned>(compute(s.inputs));
      void* params[] = {&address, &address, &address, &count};
      PYGRAPH_CHECK(driver, launch_kernel(device.kernel("add"), 2, 1, 1, 128, 1, 1, 0, s.stream,
                                          params, nullptr));
      return std::vector<uint64_t>{};
    });
  };
  unsigned count = kCount;
  EXPECT_EQ(launched_with([&](auto) { return --count; }), "0 noise, 0 unexplained");
  is_foreign = true;
  expect_refused(launched_with([&](auto) { return --count; }));
}

TEST_F(ComputedWordsTest, PaddingStaysNoise) {
  uint64_t garbage = 0x1234;
  EXPECT_EQ(in_struct([&](auto) { return garbage += 8; }), "1 noise, 0 unexplained");
  EXPECT_EQ(in_struct([&](auto) { return garbage *= 1103515245; }), "1 noise, 0 unexplained");
}

// Pointers to the host's memory that differ, by chance, as addresses of the GPU do.
TEST_F(ComputedWordsTest, LeftoversFarFromTheAddressesStayNoise) {
  std::vector<uint64_t> before;
  const uint64_t base = 0x5555'0000'1000;
  for (const uint64_t scale : {1, 2, 4, 8, 16}) {
    before.clear();
    EXPECT_EQ(in_struct([&](auto in) {
                const uint64_t distance = (in[2] - in[0]) / scale;
                if (before.empty()) before.assign({distance});
                return base + distance - before[0];
              }),
              "1 noise, 0 unexplained");
  }
}

// A struct of 32-bit numbers need not begin where a word does: half of one is its, half is another
// parameter's. What differs in the struct's half is its padding.
TEST_F(ComputedWordsTest, HalfAWordOfAStructIsNoise) {
  uint64_t garbage = 5;
  TwoRecordings recordings = record_twice(device, {kBytes, kBytes}, [&](Session& s) {
    garbage += uint64_t{1} << 32;
    device.add_one_struct(s.stream, s.inputs[0], garbage, s.inputs[1], kCount);
    return std::vector<uint64_t>{};
  });
  for (Recording* recording : {&recordings.first, &recordings.second}) {
    recording->nodes[0].params = {{0, 8}, {8, 4}, {12, 12}, {24, 4}};
  }
  EXPECT_EQ(recordings.link(driver).noise_words, 1);
}

// A block that was freed just before the launch, and the end of one that is alive.
TEST_F(ComputedWordsTest, MemoryFreedBeforeTheLaunchIsNotItsNeighboursEnd) {
  TwoRecordings recordings = record_twice(device, {kBytes}, [&](Session& s) {
    const uint64_t result = s.pool.allocate(kBytes);
    const uint64_t table = s.pool.allocate(kBytes);
    device.add_constant(s.stream, table, s.inputs[0], kCount, 1);
    s.pool.free(table);
    device.add(s.stream, result, s.inputs[0], table, kCount);
    return std::vector{result};
  });
  const LinkedGraph linked = recordings.link(driver);
  ASSERT_EQ(linked.relocations.size(), 5);
  EXPECT_EQ(linked.relocations[4].addend, 0);
  EXPECT_EQ(linked.symbols[linked.relocations[4].symbol].kind, SymbolKind::kInternal);
}

}  // namespace
}  // namespace pygraph::testing
