#include "pygraph/executable.h"

#include <array>
#include <bit>
#include <thread>

#include "test_device.h"

namespace pygraph::testing {
namespace {

constexpr unsigned kCount = 256;
constexpr uint64_t kBytes = kCount * sizeof(float);

class ExecutableTest : public DeviceTest {
 protected:
  // result = ((input + 1) + input) + 3, through two internal buffers.
  std::unique_ptr<ExecutableGraph> three_steps() {
    TwoRecordings recordings = record_twice(device, {kBytes}, [&](Session& s) {
      const uint64_t first = s.pool.allocate(kBytes);
      device.add_constant(s.stream, first, s.inputs[0], kCount, 1);
      const uint64_t second = s.pool.allocate(kBytes);
      device.add(s.stream, second, first, s.inputs[0], kCount);
      s.pool.free(first);
      const uint64_t result = s.pool.allocate(kBytes);
      device.add_constant_packed(s.stream, result, second, kCount, 3);
      s.pool.free(second);
      return std::vector{result};
    });
    LinkedGraph linked = recordings.link(driver);
    return std::make_unique<ExecutableGraph>(driver, std::move(recordings.graph),
                                             std::move(linked));
  }
  uint64_t filled(float value) { return device.floats(std::vector<float>(kCount, value)); }
  void expect_all(uint64_t address, float value) {
    EXPECT_EQ(device.read_floats(address, kCount), std::vector<float>(kCount, value));
  }
};

TEST_F(ExecutableTest, ReplaysOnOtherBuffersAndKeepsEarlierResults) {
  const auto graph = three_steps();
  const uint64_t workspace = device.allocate(graph->linked().workspace_size);
  std::vector<uint64_t> results;
  for (int i = 0; i < 8; ++i) {
    const uint64_t input = filled(static_cast<float>(i));
    results.push_back(filled(-1));
    const uint64_t addresses[] = {input, results.back(), workspace};
    graph->bind(addresses);
    graph->launch(stream.get());
  }
  for (int i = 0; i < 8; ++i) expect_all(results[i], static_cast<float>(2 * i + 4));
}

TEST_F(ExecutableTest, OnlyNodesWithChangedAddressesAreTouched) {
  const auto graph = three_steps();
  const uint64_t workspace = device.allocate(graph->linked().workspace_size);
  const uint64_t input = filled(1);
  const uint64_t addresses[] = {input, filled(0), workspace};
  graph->bind(addresses);
  EXPECT_EQ(graph->bind(addresses), 0);
  const uint64_t other_output[] = {input, filled(0), workspace};
  EXPECT_EQ(graph->bind(other_output), 1);  // one node writes the output
  const uint64_t other_input[] = {filled(2), other_output[1], workspace};
  EXPECT_EQ(graph->bind(other_input), 2);  // two nodes read the input
  graph->launch(stream.get());
  expect_all(other_output[1], 8);
}

// An input that is a number has its bits as its address (bindings/tensors/followed_number.h).
TEST_F(ExecutableTest, ANumberThatKernelsTakeByValueIsAnInput) {
  const auto bits = [](double number) { return std::bit_cast<uint64_t>(number); };
  const std::array numbers = {bits(0.5), bits(0.25)};
  size_t recording = 0;
  TwoRecordings recordings = record_twice(device, {kBytes}, [&](Session& s) {
    const uint64_t result = s.pool.allocate(kBytes);
    device.add_one_struct(s.stream, result, numbers.at(recording++), s.inputs[0], kCount);
    return std::vector{result};
  });
  recordings.first.inputs.push_back({numbers[0], 1});
  recordings.second.inputs.push_back({numbers[1], 1});
  LinkedGraph linked = recordings.link(driver);
  ASSERT_EQ(linked.relocations.size(), 3);
  EXPECT_EQ(linked.symbols[linked.relocations[1].symbol].slot, 1);
  ExecutableGraph graph(driver, std::move(recordings.graph), std::move(linked));
  const uint64_t input = filled(1);
  const uint64_t output = filled(0);
  for (const double number : {0.9, 0.1, 0.0}) {
    const uint64_t addresses[] = {input, bits(number), output, 0};
    EXPECT_EQ(graph.bind(addresses), 1);
    EXPECT_EQ(graph.bind(addresses), 0);
    graph.launch(stream.get());
    expect_all(output, 2);
  }
}

TEST_F(ExecutableTest, TheWorkspaceCanMove) {
  const auto graph = three_steps();
  const uint64_t input = filled(1);
  const uint64_t output = filled(0);
  for (int i = 0; i < 3; ++i) {
    const uint64_t addresses[] = {input, output, device.allocate(graph->linked().workspace_size)};
    graph->bind(addresses);
    graph->launch(stream.get());
    expect_all(output, 6);
  }
}

TEST_F(ExecutableTest, OneThatWasDroppedIsMadeAgainForTheSameAddresses) {
  const auto graph = three_steps();
  const uint64_t workspace = device.allocate(graph->linked().workspace_size);
  const uint64_t input = filled(1);
  for (int i = 0; i < 3; ++i) {
    const uint64_t addresses[] = {input, filled(0), workspace};
    graph->bind(addresses);
    EXPECT_FALSE(graph->was_launched());
    graph->launch(stream.get());
    EXPECT_TRUE(graph->was_launched());
    graph->drop();
    EXPECT_THROW(graph->launch(stream.get()), std::logic_error);
    graph->bind(addresses);
    graph->launch(stream.get());
    graph->drop();
    expect_all(addresses[1], 6);
  }
}

// Libraries lower the limit again after a launch.
TEST_F(ExecutableTest, LoweredLimitsOfSharedMemoryAreRaised) {
  constexpr unsigned kShared = 60000;
  const CUfunction function = device.kernel("add_constant");
  const auto limit_to = [&](int bytes) {
    PYGRAPH_CHECK(driver,
                  function_set_attribute(function, abi::kFunctionMaxDynamicSharedBytes, bytes));
  };
  limit_to(kShared);
  TwoRecordings recordings = record_twice(device, {kBytes}, [&](Session& s) {
    uint64_t result = s.pool.allocate(kBytes);
    uint64_t input = s.inputs[0];
    unsigned count = kCount;
    float value = 1;
    void* params[] = {&result, &input, &count, &value};
    PYGRAPH_CHECK(
        driver, launch_kernel(function, 1, 1, 1, kCount, 1, 1, kShared, s.stream, params, nullptr));
    return std::vector{result};
  });
  LinkedGraph linked = recordings.link(driver);
  ExecutableGraph graph(driver, std::move(recordings.graph), std::move(linked));
  const uint64_t output = filled(0);
  for (int i = 0; i < 3; ++i) {
    limit_to(2048);
    const uint64_t addresses[] = {filled(static_cast<float>(i)), output, 0};
    graph.bind(addresses);
    graph.launch(stream.get());
    expect_all(output, static_cast<float>(i + 1));
  }
  int limit = 0;
  PYGRAPH_CHECK(driver,
                function_get_attribute(&limit, abi::kFunctionMaxDynamicSharedBytes, function));
  EXPECT_GE(limit, static_cast<int>(kShared));
}

// result = (a + b) + 1 + 1 + b, where nobody needs `a` afterwards: the second internal buffer and
// then the result can live in a's memory.
TEST_F(ExecutableTest, ADonatedInputServesAsWorkspaceAndOutput) {
  constexpr unsigned kMany = 1U << 18;
  constexpr uint64_t kLarge = kMany * sizeof(float);
  TwoRecordings recordings = record_twice(device, {kLarge, kLarge}, [&](Session& s) {
    const uint64_t first = s.pool.allocate(kLarge);
    device.add(s.stream, first, s.inputs[0], s.inputs[1], kMany);
    const uint64_t second = s.pool.allocate(kLarge);
    device.add_constant(s.stream, second, first, kMany, 1);
    const uint64_t third = s.pool.allocate(kLarge);
    device.add_constant(s.stream, third, second, kMany, 1);
    s.pool.free(first);
    s.pool.free(second);
    const uint64_t result = s.pool.allocate(kLarge);
    device.add(s.stream, result, third, s.inputs[1], kMany);
    s.pool.free(third);
    return std::vector{result};
  });
  LinkedGraph linked = recordings.link(driver, {.donated = {{0, kLarge}}});
  ASSERT_EQ(linked.placements, std::vector<OutputPlacement>{{.input = 0}});
  ASSERT_EQ(linked.regions.size(), 1);
  EXPECT_EQ(linked.regions[0].input, 0);
  EXPECT_EQ(linked.workspace_size, 2 * kLarge);
  EXPECT_EQ(linked.workspace_size_if_kept, 3 * kLarge);
  const uint64_t fallback = linked.regions[0].fallback_offset;
  ExecutableGraph graph(driver, std::move(recordings.graph), std::move(linked));

  const uint64_t b = device.floats(std::vector<float>(kMany, 10));
  const std::vector<float> expected(kMany, 25);
  const uint64_t given = device.floats(std::vector<float>(kMany, 3));
  const uint64_t workspace = device.allocate(2 * kLarge);
  const uint64_t when_given[] = {given, b, given, workspace, given};
  graph.bind(when_given);
  graph.launch(stream.get());
  EXPECT_EQ(device.read_floats(given, kMany), expected);

  const uint64_t kept = device.floats(std::vector<float>(kMany, 3));
  const uint64_t result = device.allocate(kLarge);
  const uint64_t large_workspace = device.allocate(3 * kLarge);
  const uint64_t when_kept[] = {kept, b, result, large_workspace, large_workspace + fallback};
  graph.bind(when_kept);
  graph.launch(stream.get());
  EXPECT_EQ(device.read_floats(result, kMany), expected);
  EXPECT_EQ(device.read_floats(kept, kMany), std::vector<float>(kMany, 3));
}

TEST_F(ExecutableTest, CopiesAndFillsFollowTheirBuffers) {
  TwoRecordings recordings = record_twice(device, {kBytes}, [&](Session& s) {
    const uint64_t result = s.pool.allocate(2 * kBytes);
    PYGRAPH_CHECK(driver, copy_on_device_async(result, s.inputs[0], kBytes, s.stream));
    PYGRAPH_CHECK(driver, memset_d8_async(result + kBytes, 0, kBytes, s.stream));
    return std::vector{result};
  });
  LinkedGraph linked = recordings.link(driver);
  ExecutableGraph graph(driver, std::move(recordings.graph), std::move(linked));
  for (const float value : {5.0F, 6.0F}) {
    const uint64_t output = device.floats(std::vector<float>(2 * kCount, -1));
    const uint64_t addresses[] = {filled(value), output, 0};
    graph.bind(addresses);
    graph.launch(stream.get());
    expect_all(output, value);
    expect_all(output + kBytes, 0);
  }
}

TEST_F(ExecutableTest, ForkedStreamsReplayInTheirOrder) {
  const Stream side = create_stream(driver);
  const Event fork = create_event(driver);
  const Event joined = create_event(driver);
  TwoRecordings recordings = record_twice(device, {kBytes}, [&](Session& s) {
    const uint64_t left = s.pool.allocate(kBytes);
    const uint64_t right = s.pool.allocate(kBytes);
    const uint64_t result = s.pool.allocate(kBytes);
    PYGRAPH_CHECK(driver, event_record(fork.get(), s.stream));
    PYGRAPH_CHECK(driver, stream_wait_event(side.get(), fork.get(), 0));
    device.add_constant(s.stream, left, s.inputs[0], kCount, 1);
    device.add_constant(side.get(), right, s.inputs[0], kCount, 2);
    PYGRAPH_CHECK(driver, event_record(joined.get(), side.get()));
    PYGRAPH_CHECK(driver, stream_wait_event(s.stream, joined.get(), 0));
    device.add(s.stream, result, left, right, kCount);
    s.pool.free(left);
    s.pool.free(right);
    return std::vector{result};
  });
  LinkedGraph linked = recordings.link(driver);
  EXPECT_EQ(linked.workspace_size, 2 * kBytes);
  const uint64_t workspace = device.allocate(linked.workspace_size);
  ExecutableGraph graph(driver, std::move(recordings.graph), std::move(linked));
  for (const float value : {1.0F, 10.0F}) {
    const uint64_t output = filled(-1);
    const uint64_t addresses[] = {filled(value), output, workspace};
    graph.bind(addresses);
    graph.launch(stream.get());
    expect_all(output, 2 * value + 3);
  }
}

// result = (input + 4) + 5, both kernels inside a child graph.
TEST_F(ExecutableTest, NodesOfAChildGraphAreRelocated) {
  const auto record_in_child = [&](AddressSpace& space, Graph& graph) {
    const uint64_t input = space.allocate(kBytes, 0, AddressSpace::Content::kFloating);
    const uint64_t result = space.allocate(kBytes, 0, AddressSpace::Content::kOther);
    PYGRAPH_CHECK(driver, stream_begin_capture(stream.get(), abi::kCaptureModeThreadLocal));
    device.add_constant(stream.get(), result, input, kCount, 4);
    device.add_constant(stream.get(), result, result, kCount, 5);
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
    recording.allocations = {{result, kBytes, 0, Allocation::kNever}};
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
  ASSERT_EQ(linked.recording.nodes.size(), 3);
  ASSERT_EQ(linked.recording.nodes[0].kind, NodeKind::kChildGraph);
  EXPECT_EQ(linked.relocations.size(), 4);
  ExecutableGraph executable(driver, std::move(graph), std::move(linked));
  for (const float value : {1.0F, 2.0F}) {
    const uint64_t output = filled(-1);
    const uint64_t addresses[] = {filled(value), output, 0};
    executable.bind(addresses);
    executable.launch(stream.get());
    expect_all(output, value + 9);
  }
}

TEST_F(ExecutableTest, ARefusedUpdateIsNeverLaunchedAndTheNextBindRecovers) {
  if (!device.is_simulated()) GTEST_SKIP() << "needs failure injection";
  const auto graph = three_steps();
  const uint64_t workspace = device.allocate(graph->linked().workspace_size);
  const uint64_t output = filled(0);
  const uint64_t addresses[] = {filled(1), output, workspace};
  graph->bind(addresses);
  device.simulator().fail("cuGraphExecKernelNodeSetParams", 2, abi::kInvalidValue);
  const uint64_t moved[] = {filled(5), output, workspace};
  EXPECT_THROW(graph->bind(moved), DriverError);
  EXPECT_THROW(graph->launch(stream.get()), std::logic_error);
  graph->bind(moved);
  graph->launch(stream.get());
  expect_all(output, 14);
}

TEST_F(ExecutableTest, GraphsOfSeveralThreadsAreIndependent) {
  std::vector<std::unique_ptr<ExecutableGraph>> graphs;
  std::vector<std::vector<uint64_t>> addresses;
  for (int t = 0; t < 3; ++t) {
    graphs.push_back(three_steps());
    addresses.push_back({filled(static_cast<float>(t)), filled(0),
                         device.allocate(graphs.back()->linked().workspace_size)});
  }
  CUcontext context = nullptr;
  PYGRAPH_CHECK(driver, context_get_current(&context));
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      PYGRAPH_CHECK(driver, context_set_current(context));
      const Stream own = create_stream(driver);
      for (int i = 0; i < 100; ++i) {
        graphs[t]->bind(addresses[t]);
        graphs[t]->launch(own.get());
      }
      PYGRAPH_CHECK(driver, stream_synchronize(own.get()));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int t = 0; t < 3; ++t) expect_all(addresses[t][1], static_cast<float>(2 * t + 4));
}

}  // namespace
}  // namespace pygraph::testing
