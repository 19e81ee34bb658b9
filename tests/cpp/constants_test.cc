// Addresses that are equal in both recordings: somebody answers for the memory, or there is no
// graph.
#include "pygraph/constants.h"

#include <algorithm>
#include <cstring>

#include "test_device.h"

namespace pygraph::testing {
namespace {

constexpr unsigned kCount = 256;
constexpr uint64_t kBytes = kCount * sizeof(float);

class ConstantsTest : public DeviceTest {
 protected:
  LinkedGraph link(const Computation& computation) {
    recordings = record_twice(device, {kBytes}, computation);
    return pygraph::link(driver, recordings.first, recordings.second, {}, 1, around);
  }
  std::string refusal(const Computation& computation) {
    try {
      link(computation);
    } catch (const NotRelocatable& error) {
      return error.what();
    }
    return "(not refused)";
  }
  // Adds memory at `address` to the input.
  Computation add(uint64_t address) {
    return [this, address](Session& s) {
      const uint64_t result = s.pool.allocate(kBytes);
      device.add(s.stream, result, s.inputs[0], address, kCount);
      return std::vector{result};
    };
  }
  void* pinned_memory() { return device.pinned(kCount, 0).data(); }
  void expect_refusal(const Computation& computation, const std::string& text) {
    const std::string reason = refusal(computation);
    EXPECT_NE(reason.find(text), std::string::npos) << reason;
  }

  TwoRecordings recordings;
  Surroundings around;
  uint64_t table = device.floats(std::vector<float>(kCount, 5));
};

TEST_F(ConstantsTest, MemoryThatTheGraphHoldsNeedsNoCheck) {
  around.held = {{table, kBytes}};
  const LinkedGraph linked = link(add(table));
  EXPECT_TRUE(linked.foreign.empty());
  EXPECT_EQ(linked.unexplained_words, 0);
}

// A library may keep it for all its kernels, and write to it.
TEST_F(ConstantsTest, NodesWithKnownAccessesThatUseOtherMemoryAreTold) {
  around.held = {{table, kBytes}};
  EXPECT_TRUE(link(add(table)).uses_of_other_memory.empty());  // nothing is known
  recordings = record_twice(device, {kBytes}, add(table));
  Node& node = recordings.second.nodes[0];
  node.has_known_accesses = true;
  const auto uses = [&] {
    return pygraph::link(driver, recordings.first, recordings.second, {}, 1, around)
        .uses_of_other_memory;
  };
  for (const uint32_t offset : node.address_offsets()) {
    if (node.word_at(offset) != table) continue;
    ASSERT_EQ(uses().size(), 1);
    EXPECT_TRUE(uses()[0].writes && !uses()[0].is_argument);
    node.reads = {offset};
    ASSERT_EQ(uses().size(), 1);
    EXPECT_TRUE(!uses()[0].writes && uses()[0].is_argument);
  }
  EXPECT_EQ(node.reads.size(), 1);
}

TEST_F(ConstantsTest, TheAllocatorIsAskedOnlyWhereAConstantIsNotHeld) {
  int asked = 0;
  around.cached = [&] { return ++asked, std::vector<Range>{}; };
  around.held = {{table, kBytes}};
  link(add(table));
  EXPECT_EQ(asked, 0);
  around.held.clear();
  link(add(table));
  EXPECT_EQ(asked, 1);
}

TEST_F(ConstantsTest, OtherMemoryIsCheckedBeforeEachLaunch) {
  abi::DevicePointer other = 0;
  PYGRAPH_CHECK(driver, memory_allocate(&other, kBytes));
  device.write_bytes(other, std::vector<float>(kCount, 5).data(), kBytes);
  LinkedGraph linked = link(add(other));
  ASSERT_EQ(linked.foreign.size(), 1);
  EXPECT_NE(linked.foreign[0].user.find("kernel add"), std::string::npos);
  ExecutableGraph graph(driver, std::move(recordings.graph), std::move(linked));
  const std::vector<uint64_t> addresses = {table, device.allocate(kBytes), device.allocate(1)};
  graph.bind(addresses);
  graph.launch(stream.get());
  EXPECT_EQ(device.read_floats(addresses[1], 1), std::vector<float>{10});
  PYGRAPH_CHECK(driver, memory_free(other));
  EXPECT_THROW(graph.launch(stream.get()), MemoryGone);
  // Not even if there is memory again, at the same address if the driver so likes.
  PYGRAPH_CHECK(driver, memory_allocate(&other, kBytes));
  EXPECT_THROW(graph.launch(stream.get()), MemoryGone);
  PYGRAPH_CHECK(driver, memory_free(other));
}

// A kernel may count backwards from it.
TEST_F(ConstantsTest, TheEndOfMemoryIsItsOwners) {
  const uint64_t size = (uint64_t{1} << 22) - 64;  // no other memory begins at its end
  abi::DevicePointer other = 0;
  PYGRAPH_CHECK(driver, memory_allocate(&other, size));
  const LinkedGraph linked = link(add(other + size));
  ASSERT_EQ(linked.foreign.size(), 1);
  check_foreign_memory(driver, linked.foreign);
  around.held = {{other, size}};
  EXPECT_TRUE(link(add(other + size)).foreign.empty());
  around = {.cached = [&] { return std::vector<Range>{{other, size}}; }};
  expect_refusal(add(other + size), "kernel add uses memory that is no argument");
  PYGRAPH_CHECK(driver, memory_free(other));
  EXPECT_THROW(check_foreign_memory(driver, linked.foreign), MemoryGone);
}

TEST_F(ConstantsTest, MemoryOfAnAllocatorIsRefused) {
  around.cached = [&] { return std::vector<Range>{{table, kBytes}}; };
  expect_refusal(add(table), "kernel add uses memory that is no argument");
  expect_refusal(add(table + kBytes - 4), "kernel add uses memory");
}

TEST_F(ConstantsTest, TheRefusalNamesTheOperator) {
  around.cached = [&] { return std::vector<Range>{{table, kBytes}}; };
  recordings = record_twice(device, {kBytes}, add(table));
  recordings.second.operators = {{.name = "my::op", .first = 0, .last = 1}};
  try {
    pygraph::link(driver, recordings.first, recordings.second, {}, 1, around);
    FAIL();
  } catch (const NotRelocatable& error) {
    EXPECT_EQ(std::string(error.what()).find("operator my::op, node 0, kernel add"), 0);
  }
}

// In a struct it may be a leftover; which it is, the operator's arguments tell.
class LeftoversTest : public ConstantsTest {
 protected:
  // A kernel with the address in the middle of a struct, launched by such an operator, which may be
  // called by another one.
  std::string outcome(const Operator& op, const std::vector<Operator>& inner = {}) {
    around.cached = [&] { return std::vector<Range>{{table, kBytes}}; };
    recordings = record_twice(device, {kBytes}, [&](Session& s) {
      device.add_one_struct(s.stream, s.inputs[0], table, s.inputs[0], kCount);
      return std::vector<uint64_t>{};
    });
    for (Recording* recording : {&recordings.first, &recordings.second}) {
      recording->operators = {op};
      recording->inner_operators = inner;
    }
    try {
      const LinkedGraph linked =
          pygraph::link(driver, recordings.first, recordings.second, {}, 1, around);
      EXPECT_EQ(linked.recording.nodes[0].image, recordings.second.nodes[0].image);
      return std::to_string(linked.noise_words) + " noise";
    } catch (const NotRelocatable& error) {
      return error.what();
    }
  }
  const Range given = {table, kBytes};
  const std::string refused =
      "kernel add_one_struct uses memory that is no argument of its own and may be freed";
};

TEST_F(LeftoversTest, PyTorchsOwnOperatorsUseWhatTheyWereGiven) {
  EXPECT_EQ(outcome({.name = "aten::a", .last = 1}), "1 noise");
  EXPECT_EQ(outcome({.name = "aten::a", .last = 1, .arguments = {given}}),
            "operator aten::a, node 0, " + refused);
}

// Tensors of the program that were at different places when the recordings were made.
TEST_F(LeftoversTest, AWordThatDiffersMayBeOneToo) {
  const uint64_t other = device.allocate(kBytes);
  around.cached = [&] { return std::vector<Range>{{table, kBytes}, {other, kBytes}}; };
  int run = 0;
  recordings = record_twice(device, {kBytes}, [&](Session& s) {
    device.add_one_struct(s.stream, s.inputs[0], run++ == 0 ? table : other, s.inputs[0], kCount);
    return std::vector<uint64_t>{};
  });
  const LinkedGraph linked =
      pygraph::link(driver, recordings.first, recordings.second, {}, 1, around);
  EXPECT_EQ(linked.noise_words, 1);
  EXPECT_EQ(linked.recording.nodes[0].word_at(8), other);
}

TEST_F(LeftoversTest, OthersMayUseAnything) {
  EXPECT_EQ(outcome({.name = "my::a", .last = 1, .is_foreign = true}),
            "operator my::a, node 0, " + refused);
}

TEST_F(LeftoversTest, WhatOthersCallIsJudgedByItsArguments) {
  const Operator outer = {.name = "my::a", .last = 1, .is_foreign = true};
  EXPECT_EQ(outcome(outer, {{.name = "aten::b", .last = 1}}), "1 noise");
  EXPECT_EQ(outcome(outer, {{.name = "aten::b", .last = 1, .arguments = {given}}}),
            "operator my::a, node 0, " + refused);
  EXPECT_EQ(outcome(outer, {{.name = "aten::b", .first = 1, .last = 2}}),
            "operator my::a, node 0, " + refused);
}

// cuBLAS uses the workspace of the stream, which is no argument of the product.
TEST_F(LeftoversTest, WorkspacesOfLibrariesAreUsedOnTheirStream) {
  around.workspaces = {{table - 64, kBytes}};
  EXPECT_EQ(outcome({.name = "aten::mm", .last = 1, .is_on_side_stream = true}),
            "operator aten::mm, node 0, " + refused);
  EXPECT_EQ(outcome({.name = "aten::mm", .last = 1}), "1 noise");
}

TEST_F(ConstantsTest, StandInsThatSomebodyKeptAreRefusedEverywhere) {
  around.kept_stand_ins = {{table, kBytes}};
  expect_refusal(add(table), "kept from a recording");
  expect_refusal(
      [&](Session& s) {
        device.add_one_struct(s.stream, s.inputs[0], table, s.inputs[0], kCount);
        return std::vector<uint64_t>{};
      },
      "kept from a recording");
}

TEST_F(ConstantsTest, AnAddressOfTheFirstRecordingInTheSecondIsRefused) {
  uint64_t kept = 0;
  expect_refusal(
      [&](Session& s) {
        const uint64_t result = s.pool.allocate(kBytes);
        if (kept == 0) kept = result;
        device.add(s.stream, s.inputs[0], s.inputs[0], kept, kCount);
        return std::vector{result};
      },
      "kept from a recording");
}

TEST_F(ConstantsTest, HostMemoryOfCopiesMustBeHeld) {
  void* const pinned = pinned_memory();
  const Computation copy = [&](Session& s) {
    PYGRAPH_CHECK(driver, copy_to_device_async(s.inputs[0], pinned, kBytes, s.stream));
    return std::vector<uint64_t>{};
  };
  expect_refusal(copy, "a copy uses memory of the host");
  around.held = {{reinterpret_cast<uint64_t>(pinned), kBytes}};
  EXPECT_EQ(link(copy).relocations.size(), 1);
}

TEST_F(ConstantsTest, HostMemoryThatTheDriverDoesNotKnowIsRefused) {
  std::vector<float> pageable(kCount);
  expect_refusal(
      [&](Session& s) {
        PYGRAPH_CHECK(driver, copy_to_device_async(s.inputs[0], pageable.data(), kBytes, s.stream));
        return std::vector<uint64_t>{};
      },
      "a copy uses memory of the host");
}

TEST_F(ConstantsTest, ACopyOfAnotherSourceInEachRecordingIsRefused) {
  std::vector<float> pageable[2] = {std::vector<float>(kCount), std::vector<float>(kCount)};
  int run = 0;
  EXPECT_THROW(link([&](Session& s) {
                 PYGRAPH_CHECK(driver, copy_to_device_async(s.inputs[0], pageable[run++].data(),
                                                            kBytes, s.stream));
                 return std::vector<uint64_t>{};
               }),
               NotRelocatable);
}

TEST_F(ConstantsTest, PinnedMemoryInAKernelMustBeHeld) {
  const auto address = reinterpret_cast<uint64_t>(pinned_memory());
  expect_refusal(add(address), "kernel add uses memory of the host");
  around.held = {{address, kBytes}};
  EXPECT_EQ(refusal(add(address)), "(not refused)");
}

TEST_F(ConstantsTest, NumbersAreNoAddresses) {
  const uint64_t number = 123456789012;
  EXPECT_TRUE(link([&](Session& s) {
                device.add_one_struct(s.stream, s.inputs[0], number, s.inputs[0], kCount);
                return std::vector<uint64_t>{};
              }).foreign.empty());
}

TEST_F(ConstantsTest, TwoOutputsInOneAllocationAreRefused) {
  expect_refusal(
      [&](Session& s) {
        const uint64_t both = s.pool.allocate(2 * kBytes);
        device.add_constant(s.stream, both, s.inputs[0], kCount, 1);
        device.add_constant(s.stream, both + kBytes, s.inputs[0], kCount, 2);
        return std::vector{both, both + kBytes};
      },
      "outputs 0 and 1 lie in one allocation");
}

}  // namespace
}  // namespace pygraph::testing
