// Graphs whose kernels are patched on the device.
#include "pygraph/device_patcher.h"

#include <numeric>

#include "pygraph/executable.h"
#include "random_program.h"
#include "test_device.h"

namespace pygraph::testing {
namespace {

constexpr unsigned kFew = 64;
constexpr uint64_t kSize = kFew * sizeof(float);

class DevicePatcherTest : public DeviceTest {
 protected:
  uint64_t filled(float value) { return device.floats(std::vector<float>(kFew, value)); }
  void expect_all(uint64_t address, float value) {
    EXPECT_EQ(device.read_floats(address, kFew), std::vector<float>(kFew, value));
  }

  // outputs[i] = input + i + 1, one kernel each, every other one with packed parameters.
  std::unique_ptr<ExecutableGraph> many_outputs(unsigned count) {
    TwoRecordings two = record_twice(device, {kSize}, [&](Session& s) {
      std::vector<uint64_t> outputs;
      for (unsigned i = 0; i < count; ++i) {
        outputs.push_back(s.pool.allocate(kSize));
        const auto value = static_cast<float>(i + 1);
        if (i % 2 == 0) {
          device.add_constant(s.stream, outputs[i], s.inputs[0], kFew, value);
        } else {
          device.add_constant_packed(s.stream, outputs[i], s.inputs[0], kFew, value);
        }
      }
      return outputs;
    });
    LinkedGraph linked = two.link(driver);
    return std::make_unique<ExecutableGraph>(driver, std::move(two.graph), std::move(linked),
                                             Patching::kDevice);
  }
  // Replays it on other buffers.
  void replay_and_check(ExecutableGraph& graph, unsigned count, float value) {
    std::vector<uint64_t> addresses = {filled(value)};
    for (unsigned i = 0; i < count; ++i) addresses.push_back(filled(-1));
    addresses.push_back(0);
    EXPECT_EQ(graph.bind(addresses), count);
    graph.launch(stream.get());
    for (unsigned i = 0; i < count; ++i) {
      expect_all(addresses[i + 1], value + static_cast<float>(i + 1));
    }
  }
};

TEST_F(DevicePatcherTest, KernelsFollowTheirBuffers) {
  const auto graph = many_outputs(6);
  for (const float value : {1.0F, 2.0F, 3.0F}) replay_and_check(*graph, 6, value);
  if (!device.is_simulated()) return;
  EXPECT_EQ(device.simulator().calls("cuGraphExecKernelNodeSetParams"), 0);
}

TEST_F(DevicePatcherTest, MoreSlotsMayChangeThanOneLaunchTells) {
  constexpr unsigned kMany = 600;
  const auto graph = many_outputs(kMany);
  EXPECT_EQ(graph->nodes_on_device(), kMany);
  EXPECT_EQ(graph->device_bytes(), 2 * kMany * sizeof(DevicePatcher::Word));
  for (const float value : {1.0F, 2.0F}) replay_and_check(*graph, kMany, value);
}

TEST_F(DevicePatcherTest, WhatDidNotChangeIsNotPatched) {
  if (!device.is_simulated()) GTEST_SKIP() << "counts calls";
  const auto graph = many_outputs(2);
  const uint64_t addresses[] = {filled(1), filled(0), filled(0), 0};
  graph->bind(addresses);
  graph->launch(stream.get());
  const int launches = device.simulator().calls("cuLaunchKernel");
  EXPECT_EQ(graph->bind(addresses), 0);
  graph->launch(stream.get());
  EXPECT_EQ(device.simulator().calls("cuLaunchKernel"), launches);
}

// Addresses of a bind() that no launch followed are not lost.
TEST_F(DevicePatcherTest, AllChangesSinceTheLastLaunchAreMade) {
  const auto graph = many_outputs(2);
  std::vector<uint64_t> addresses = {filled(1), filled(0), filled(0), 0};
  graph->bind(addresses);
  graph->launch(stream.get());
  addresses[1] = filled(0);
  graph->bind(addresses);
  addresses[0] = filled(5);
  graph->bind(addresses);
  graph->launch(stream.get());
  expect_all(addresses[1], 6);
  expect_all(addresses[2], 7);
}

// What the device cannot patch, the host does: launches see both.
TEST_F(DevicePatcherTest, CopiesAndFillsAmongKernels) {
  TwoRecordings two = record_twice(device, {kSize}, [&](Session& s) {
    const uint64_t result = s.pool.allocate(2 * kSize);
    PYGRAPH_CHECK(driver, copy_on_device_async(result, s.inputs[0], kSize, s.stream));
    PYGRAPH_CHECK(driver, memset_d8_async(result + kSize, 0, kSize, s.stream));
    device.add_constant(s.stream, result, result, kFew, 1);
    device.add(s.stream, result + kSize, result + kSize, s.inputs[0], kFew);
    return std::vector{result};
  });
  LinkedGraph linked = two.link(driver);
  ExecutableGraph graph(driver, std::move(two.graph), std::move(linked), Patching::kDevice);
  EXPECT_EQ(graph.nodes_on_device(), 2);
  const uint64_t outputs[] = {device.allocate(2 * kSize), device.allocate(2 * kSize)};
  // Inputs and outputs change together, and one at a time.
  int round = 0;
  for (const uint64_t output : {outputs[0], outputs[1], outputs[1], outputs[0], outputs[0]}) {
    const auto value = static_cast<float>(++round);
    const uint64_t addresses[] = {filled(value), output, 0};
    graph.bind(addresses);
    graph.launch(stream.get());
    expect_all(output, value + 1);
    expect_all(output + kSize, value);
  }
}

TEST_F(DevicePatcherTest, RandomProgramsGiveTheSameResultsInBothForms) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    const Program program(seed);
    TwoRecordings two = record_twice(device, std::vector<uint64_t>(kInputs, kInputBytes),
                                     [&](Session& s) { return program.record(device, s); });
    LinkedGraph linked = two.link(driver, {.donated = {{0, kInputBytes}, {2, kInputBytes}}});
    ExecutableGraph on_host(driver, std::move(two.graph), std::move(linked));
    replay(device, stream.get(), on_host, program, /*donated=*/true, 1);
    const auto on_device = on_host.copy(Patching::kDevice);
    for (const float first : {10.0F, 20.0F}) {
      replay(device, stream.get(), *on_device, program, /*donated=*/true, first);
      replay(device, stream.get(), on_host, program, /*donated=*/false, first + 1);
      replay(device, stream.get(), *on_device, program, /*donated=*/false, first + 2);
    }
  }
}

// A kernel that adds one to a buffer, as a graph whose node the device may update.
class OneNode {
 public:
  OneNode(const Device& device, CUstream stream, uint64_t buffer) : driver_(device.driver()) {
    PYGRAPH_CHECK(driver_, stream_begin_capture(stream, abi::kCaptureModeThreadLocal));
    device.add_constant(stream, buffer, buffer, kFew, 1);
    CUgraph raw = nullptr;
    PYGRAPH_CHECK(driver_, stream_end_capture(stream, &raw));
    graph_ = Graph(driver_, raw);
    abi::LaunchAttributeValue value{};
    value.device_updatable.is_updatable = 1;
    const CUgraphNode node = read_graph(driver_, raw).nodes[0].handle;
    PYGRAPH_CHECK(driver_,
                  graph_kernel_set_attribute(node, abi::kLaunchAttributeDeviceUpdatable, &value));
    words[0].node = value.device_updatable.node;
  }
  // There may be one at a time.
  GraphExec instantiate() const {
    abi::InstantiateParams params{};
    CUgraphExec raw = nullptr;
    PYGRAPH_CHECK(driver_, graph_instantiate(&raw, graph_.get(), &params));
    return {driver_, raw};
  }
  DevicePatcher::Word words[1];  // where the result goes

 private:
  const Driver& driver_;
  Graph graph_;
};

TEST_F(DevicePatcherTest, ChangesThatTheDeviceRefusesAreNoticed) {
  // A GPU answers some of these, and takes others for what they are not.
  if (!device.is_simulated()) GTEST_SKIP() << "needs a device that refuses";
  const OneNode node(device, stream.get(), filled(1));
  const GraphExec exec = node.instantiate();
  const DevicePatcher::Change changes[] = {{filled(7), 0, 1}};
  DevicePatcher patcher(driver, node.words);
  patcher.patch(stream.get(), changes);
  EXPECT_THROW(patcher.confirm(stream.get()), DriverError);  // it was not uploaded
}

TEST_F(DevicePatcherTest, ANodeKeepsItsHandleInTheNextExecutable) {
  const uint64_t buffer = filled(1);
  const OneNode node(device, stream.get(), buffer);
  DevicePatcher patcher(driver, node.words);
  for (const float value : {5.0F, 6.0F}) {
    const GraphExec exec = node.instantiate();
    PYGRAPH_CHECK(driver, graph_upload(exec.get(), stream.get()));
    const DevicePatcher::Change changes[] = {{filled(value), 0, 1}};
    patcher.patch(stream.get(), changes);
    patcher.confirm(stream.get());
    PYGRAPH_CHECK(driver, graph_launch(exec.get(), stream.get()));
    expect_all(changes[0].address, 2);
    expect_all(buffer, 1);
  }
}

TEST_F(DevicePatcherTest, ARefusedLaunchIsNoneAndTheNextBindRecovers) {
  if (!device.is_simulated()) GTEST_SKIP() << "needs failure injection";
  const auto graph = many_outputs(3);
  replay_and_check(*graph, 3, 1);
  const uint64_t outputs[] = {filled(0), filled(0), filled(0)};
  const uint64_t addresses[] = {filled(5), outputs[0], outputs[1], outputs[2], 0};
  for (const char* symbol : {"cuLaunchKernel", "cuGraphLaunch"}) {
    graph->bind(addresses);
    device.simulator().fail(symbol, 1, abi::kInvalidValue);
    EXPECT_THROW(graph->launch(stream.get()), DriverError);
    EXPECT_THROW(graph->launch(stream.get()), std::logic_error);
    expect_all(outputs[0], 0);
    replay_and_check(*graph, 3, 2);
  }
  graph->bind(addresses);
  graph->launch(stream.get());
  expect_all(outputs[2], 8);
}

}  // namespace
}  // namespace pygraph::testing
