// Executables of graphs with many fills, which are instantiated for launches by a device, too.
#include <array>
#include <cstdlib>

#include "pygraph/executable.h"
#include "test_device.h"

namespace pygraph::testing {
namespace {

constexpr unsigned kCount = 256;
constexpr uint64_t kBytes = kCount * sizeof(float);
constexpr uint64_t kBoth = abi::kInstantiateDeviceLaunch | abi::kInstantiateUseNodePriority;

class DeviceLaunchTest : public DeviceTest {
 protected:
  // The first half of the result is cleared `fills` times, and is input + fills; its second half is
  // the input.
  void work(CUstream on, uint64_t result, uint64_t input, int fills) {
    for (int i = 0; i < fills; ++i) {
      PYGRAPH_CHECK(driver, memset_d8_async(result, 0, kBytes, on));
      device.add_constant(on, result, i == 0 ? input : result + kBytes, kCount, 1);
      device.add_constant(on, result + kBytes, result, kCount, 0);
    }
    PYGRAPH_CHECK(driver, copy_on_device_async(result + kBytes, input, kBytes, on));
  }
  std::unique_ptr<ExecutableGraph> with_fills(int fills) {
    TwoRecordings recordings = record_twice(device, {kBytes}, [&](Session& s) {
      const uint64_t result = s.pool.allocate(2 * kBytes);
      work(s.stream, result, s.inputs[0], fills);
      return std::vector{result};
    });
    LinkedGraph linked = recordings.link(driver);
    return std::make_unique<ExecutableGraph>(driver, std::move(recordings.graph),
                                             std::move(linked));
  }
  std::array<uint64_t, 3> addresses(float value) {
    return {device.floats(std::vector<float>(kCount, value)),
            device.floats(std::vector<float>(2 * kCount, -1)), 0};
  }
  void expect_result(const std::array<uint64_t, 3>& bound, float value, int fills) {
    const float sum = value + static_cast<float>(fills);
    EXPECT_EQ(device.read_floats(bound[1], kCount), std::vector<float>(kCount, sum));
    EXPECT_EQ(device.read_floats(bound[1] + kBytes, kCount), std::vector<float>(kCount, value));
  }
  uint64_t flags() { return device.simulator().last_executable_flags(); }
};

TEST_F(DeviceLaunchTest, LaunchesInARowHaveTheirOwnAddresses) {
  for (const int fills : {1, 16}) {
    const auto graph = with_fills(fills);
    std::vector<std::array<uint64_t, 3>> bound;
    for (int i = 0; i < 64; ++i) bound.push_back(addresses(static_cast<float>(i / 2)));
    for (const auto& addresses : bound) {
      graph->bind(addresses);
      graph->launch(stream.get());
    }
    for (int i = 0; i < 64; ++i) expect_result(bound[i], static_cast<float>(i / 2), fills);
  }
}

TEST_F(DeviceLaunchTest, AnExecutableMayBeDroppedBehindItsLaunch) {
  const auto graph = with_fills(16);
  std::vector<std::array<uint64_t, 3>> bound;
  for (int i = 0; i < 8; ++i) bound.push_back(addresses(static_cast<float>(i)));
  for (const auto& addresses : bound) {
    graph->bind(addresses);
    graph->launch(stream.get());
    graph->drop();
  }
  for (int i = 0; i < 8; ++i) expect_result(bound[i], static_cast<float>(i), 16);
}

TEST_F(DeviceLaunchTest, ChildGraphsAreUpdated) {
  const auto record_in_child = [&](AddressSpace& space, Graph& graph) {
    const uint64_t input = space.allocate(kBytes, 0, AddressSpace::Content::kFloating);
    const uint64_t result = space.allocate(2 * kBytes, 0, AddressSpace::Content::kOther);
    PYGRAPH_CHECK(driver, stream_begin_capture(stream.get(), abi::kCaptureModeThreadLocal));
    work(stream.get(), result, input, 8);
    CUgraph raw = nullptr;
    PYGRAPH_CHECK(driver, stream_end_capture(stream.get(), &raw));
    const Graph inner(driver, raw);
    PYGRAPH_CHECK(driver, graph_create(&raw, 0));
    graph = Graph(driver, raw);
    CUgraphNode node = nullptr;
    PYGRAPH_CHECK(driver, graph_add_child(&node, graph.get(), nullptr, 0, inner.get()));
    Recording recording = read_graph(driver, graph.get());
    recording.inputs = {{input, kBytes}};
    recording.outputs = {result};
    recording.allocations = {{result, 2 * kBytes, 0, Allocation::kNever}};
    recording.address_space = space.range();
    return recording;
  };
  constexpr uint64_t kCapacity = uint64_t{1} << 30;
  AddressSpace space_a(driver, 0, kCapacity, 512);
  AddressSpace space_b(driver, 0, kCapacity, 1536);
  Graph first_graph;
  Graph graph;
  const Recording first = record_in_child(space_a, first_graph);
  LinkedGraph linked = link(driver, first, record_in_child(space_b, graph));
  ExecutableGraph executable(driver, std::move(graph), std::move(linked));
  std::vector<std::array<uint64_t, 3>> bound;
  for (int i = 0; i < 8; ++i) bound.push_back(addresses(static_cast<float>(i)));
  for (const auto& addresses : bound) {
    executable.bind(addresses);
    executable.launch(stream.get());
  }
  for (int i = 0; i < 8; ++i) expect_result(bound[i], static_cast<float>(i), 8);
}

// PyTorch captures in global mode: it forbids allocations of all threads.
TEST_F(DeviceLaunchTest, ACaptureOfTheProgramsIsNotDisturbed) {
  const auto graph = with_fills(16);
  const auto bound = addresses(2);
  const Stream other = create_stream(driver);
  PYGRAPH_CHECK(driver, stream_begin_capture(other.get(), abi::kCaptureModeGlobal));
  graph->bind(bound);
  CUgraph raw = nullptr;
  EXPECT_EQ(driver.stream_end_capture(other.get(), &raw), abi::kSuccess);
  const Graph captured(driver, raw);
  graph->launch(stream.get());
  expect_result(bound, 2, 16);
  if (device.is_simulated()) {
    EXPECT_EQ(flags(), abi::kInstantiateDeviceLaunch);
  }
}

TEST_F(DeviceLaunchTest, OnlyManyFillsAreWorthIt) {
  if (!device.is_simulated()) GTEST_SKIP() << "asks the simulator for flags";
  for (const auto& [fills, wanted, expected] :
       {std::tuple{3, "1", uint64_t{0}}, {4, "1", abi::kInstantiateDeviceLaunch}, {4, "0", 0}}) {
    setenv("PYGRAPH_DEVICE_LAUNCH", wanted, 1);
    const auto graph = with_fills(fills);
    graph->bind(addresses(1));
    EXPECT_EQ(flags(), expected) << fills << " fills, " << wanted;
    unsetenv("PYGRAPH_DEVICE_LAUNCH");
  }
}

TEST_F(DeviceLaunchTest, PrioritiesAreKept) {
  if (!device.is_simulated()) GTEST_SKIP() << "asks the simulator for flags";
  const auto graph = with_fills(8);
  abi::LaunchAttributeValue value{};
  value.priority = -5;
  for (const Node& node : graph->linked().recording.nodes) {
    if (node.kind != NodeKind::kKernel) continue;
    ASSERT_EQ(driver.graph_kernel_set_attribute(node.handle, abi::kLaunchAttributePriority, &value),
              0);
  }
  graph->bind(addresses(1));
  EXPECT_EQ(flags(), kBoth);
}

// Whatever the driver refuses, the usual form is used from then on.
TEST_F(DeviceLaunchTest, WhatIsRefusedIsMadeInTheUsualForm) {
  if (!device.is_simulated()) GTEST_SKIP() << "needs failure injection";
  for (const char* refused : {"cuGraphInstantiateWithParams", "cuGraphLaunch"}) {
    const auto graph = with_fills(8);
    for (const float value : {1.0F, 2.0F}) {
      if (value == 1) device.simulator().fail(refused, 1, abi::kInvalidValue);
      const auto bound = addresses(value);
      graph->bind(bound);
      graph->launch(stream.get());
      expect_result(bound, value, 8);
      EXPECT_EQ(flags(), 0) << refused;
    }
  }
}

TEST_F(DeviceLaunchTest, ARefusedUpdateIsReportedAndTheNextExecutableHasTheUsualForm) {
  if (!device.is_simulated()) GTEST_SKIP() << "needs failure injection";
  for (const char* refused : {"cuGraphExecKernelNodeSetParams", "cuGraphExecMemsetNodeSetParams",
                              "cuGraphExecMemcpyNodeSetParams"}) {
    const auto graph = with_fills(8);
    graph->bind(addresses(1));
    EXPECT_EQ(flags(), abi::kInstantiateDeviceLaunch);
    device.simulator().fail(refused, 1, abi::kInvalidValue);
    const auto bound = addresses(2);
    EXPECT_THROW(graph->bind(bound), DriverError) << refused;
    graph->bind(bound);
    EXPECT_EQ(flags(), 0) << refused;
    graph->launch(stream.get());
    expect_result(bound, 2, 8);
  }
}

TEST_F(DeviceLaunchTest, ALaunchThatFailsInBothFormsRaises) {
  if (!device.is_simulated()) GTEST_SKIP() << "needs failure injection";
  const auto graph = with_fills(8);
  graph->bind(addresses(1));
  device.simulator().fail("cuGraphLaunch", 1, abi::kInvalidValue);
  device.simulator().fail("cuGraphInstantiateWithParams", 1, abi::kOutOfMemory);
  EXPECT_THROW(graph->launch(stream.get()), DriverError);
  const auto bound = addresses(2);
  graph->bind(bound);
  graph->launch(stream.get());
  expect_result(bound, 2, 8);
}

}  // namespace
}  // namespace pygraph::testing
