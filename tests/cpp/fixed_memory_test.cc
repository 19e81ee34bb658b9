// Graphs whose computation works at fixed addresses, on copies of its inputs.
#include "pygraph/fixed_memory.h"

#include <cstring>

#include "test_device.h"

namespace pygraph::testing {
namespace {

constexpr unsigned kCount = 64;
constexpr uint64_t kBytes = kCount * sizeof(float);

class FixedMemoryTest : public DeviceTest {
 protected:
  FixedMemory memory{driver};
};

TEST_F(FixedMemoryTest, EqualRecordingsGetTheSameAddresses) {
  std::vector<uint64_t> addresses[2];
  for (auto& recording : addresses) {
    memory.rewind();
    for (const uint64_t size : {4096, 512, 4096}) recording.push_back(memory.allocate(size));
  }
  EXPECT_EQ(addresses[0], addresses[1]);
  EXPECT_EQ(memory.bytes(), 4096 + 512 + 4096);
}

TEST_F(FixedMemoryTest, ARecordingThatAsksForSomethingElseGetsOtherMemory) {
  const uint64_t first = memory.allocate(4096);
  const uint64_t second = memory.allocate(512);
  memory.rewind();
  const uint64_t other = memory.allocate(1024);
  EXPECT_NE(other, first);
  EXPECT_EQ(memory.allocate(4096), first);
  EXPECT_EQ(memory.allocate(512), second);
  EXPECT_EQ(memory.bytes(), 4096 + 512 + 1024);
}

TEST_F(FixedMemoryTest, AllOfItIsFilled) {
  const uint64_t pieces[] = {memory.allocate(kBytes), memory.allocate(2 * kBytes)};
  memory.fill(0xFF, stream.get());
  device.synchronize();
  for (const uint64_t piece : pieces) {
    EXPECT_TRUE(memory.contains(piece));
    for (const float value : device.read_floats(piece, kCount)) EXPECT_NE(value, value);
  }
  EXPECT_FALSE(memory.contains(device.allocate(kBytes)));
}

TEST_F(FixedMemoryTest, WhatIsRefusedThrowsAndNothingIsLeftBehind) {
  if (!device.is_simulated()) GTEST_SKIP() << "needs failure injection";
  const size_t live = device.simulator().live_objects();
  {
    FixedMemory other(driver);
    other.allocate(kBytes);
    device.simulator().fail("cuMemAlloc", 1, abi::kOutOfMemory);
    EXPECT_THROW(other.allocate(kBytes), DriverError);
    EXPECT_EQ(other.bytes(), kBytes);
    EXPECT_NE(other.allocate(kBytes), 0);
  }
  EXPECT_EQ(device.simulator().live_objects(), live);
}

TEST_F(FixedMemoryTest, MemoryIsTakenAndGivenBackWhileCapturing) {
  PYGRAPH_CHECK(driver, stream_begin_capture(stream.get(), abi::kCaptureModeThreadLocal));
  { FixedMemory(driver).allocate(kBytes); }
  CUgraph graph = nullptr;
  PYGRAPH_CHECK(driver, stream_end_capture(stream.get(), &graph));
  EXPECT_NE(Graph(driver, graph).get(), nullptr);
}

// The copy of the input is read through an address that device memory holds.
TEST_F(FixedMemoryTest, AHiddenAddressHolds) {
  const uint64_t table = device.allocate(8);
  uint64_t copy = 0;
  memory.allocate(512);  // not the first thing in a recording
  TwoRecordings two = record_twice(device, {kBytes}, [&](Session& s) {
    memory.rewind();
    memory.allocate(512);
    copy = memory.allocate(kBytes);
    PYGRAPH_CHECK(driver, copy_on_device_async(copy, s.inputs[0], kBytes, s.stream));
    const uint64_t sum = memory.allocate(kBytes);
    device.add_one_hidden(s.stream, sum, table, kCount);
    const uint64_t result = s.pool.allocate(kBytes);
    PYGRAPH_CHECK(driver, copy_on_device_async(result, sum, kBytes, s.stream));
    return std::vector{result};
  });
  device.write_bytes(table, &copy, sizeof copy);
  LinkedGraph linked = two.link(driver);
  EXPECT_EQ(linked.relocations.size(), 2);  // one per copy
  EXPECT_EQ(linked.noise_words + linked.unexplained_words, 0);
  ExecutableGraph graph(driver, std::move(two.graph), std::move(linked));
  for (const float value : {1.0F, 5.0F}) {
    const uint64_t input = device.floats(std::vector<float>(kCount, value));
    const uint64_t output = device.floats(std::vector<float>(kCount, 0));
    const uint64_t addresses[] = {input, output, 0};
    graph.bind(addresses);
    graph.launch(stream.get());
    EXPECT_EQ(device.read_floats(output, kCount), std::vector<float>(kCount, value + 1));
  }
}

TEST_F(FixedMemoryTest, CopiesOfSeveralRowsMayStayWhereTheyAre) {
  const auto with_two_rows = [](TwoRecordings& two) {
    for (Recording* recording : {&two.first, &two.second}) {
      abi::Memcpy3D params{};
      std::memcpy(&params, recording->nodes[0].image.data(), sizeof params);
      params.width_bytes = params.src_pitch = params.dst_pitch = kBytes / 2;
      params.height = 2;
      std::memcpy(recording->nodes[0].image.data(), &params, sizeof params);
    }
  };
  TwoRecordings moved = record_twice(device, {kBytes}, [&](Session& s) {
    const uint64_t result = s.pool.allocate(kBytes);
    PYGRAPH_CHECK(driver, copy_on_device_async(result, s.inputs[0], kBytes, s.stream));
    return std::vector{result};
  });
  with_two_rows(moved);
  EXPECT_THROW(moved.link(driver), NeedsFixedAddresses);
  TwoRecordings fixed = record_twice(device, {kBytes}, [&](Session& s) {
    memory.rewind();
    const uint64_t from = memory.allocate(kBytes);
    const uint64_t to = memory.allocate(kBytes);
    PYGRAPH_CHECK(driver, copy_on_device_async(to, from, kBytes, s.stream));
    return std::vector<uint64_t>{};
  });
  with_two_rows(fixed);
  EXPECT_EQ(fixed.link(driver).relocations.size(), 0);
}

}  // namespace
}  // namespace pygraph::testing
