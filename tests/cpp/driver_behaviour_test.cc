// What the engine relies on in the driver, checked on the simulator and on a real GPU alike.
#include "test_device.h"

namespace pygraph::testing {
namespace {

class DriverBehaviour : public DeviceTest {
 protected:
  Graph capture(const std::function<void()>& work) {
    PYGRAPH_CHECK(driver, stream_begin_capture(stream.get(), abi::kCaptureModeThreadLocal));
    work();
    CUgraph raw = nullptr;
    PYGRAPH_CHECK(driver, stream_end_capture(stream.get(), &raw));
    return {driver, raw};
  }
};

TEST_F(DriverBehaviour, CapturedWorkDoesNotExecute) {
  const uint64_t from = device.floats({1, 2});
  const uint64_t to = device.floats({0, 0});
  const Graph graph = capture([&] { device.add_constant(stream.get(), to, from, 2, 1); });
  EXPECT_EQ(device.read_floats(to, 2), (std::vector<float>{0, 0}));
}

TEST_F(DriverBehaviour, NodesComeInTheOrderOfCreation) {
  const uint64_t a = device.floats({1, 2});
  const Graph graph = capture([&] {
    device.add_constant(stream.get(), a, a, 2, 1);
    device.add(stream.get(), a, a, a, 2);
    device.add_one_struct(stream.get(), a, 0, a, 2);
  });
  const Recording recording = read_graph(driver, graph.get());
  ASSERT_EQ(recording.nodes.size(), 3);
  EXPECT_EQ(recording.nodes[0].name, "add_constant");
  EXPECT_EQ(recording.nodes[1].name, "add");
  EXPECT_EQ(recording.nodes[2].name, "add_one_struct");
}

TEST_F(DriverBehaviour, BothParameterFormsReadAsTheSameBytes) {
  const uint64_t a = device.floats({1, 2});
  const Graph graph = capture([&] {
    device.add_constant(stream.get(), a, a, 2, 3);
    device.add_constant_packed(stream.get(), a, a, 2, 3);
  });
  const Recording recording = read_graph(driver, graph.get());
  ASSERT_EQ(recording.nodes.size(), 2);
  EXPECT_EQ(recording.nodes[0].image, recording.nodes[1].image);
}

TEST_F(DriverBehaviour, AnAddressTellsItsAllocation) {
  abi::DevicePointer memory = 0;
  PYGRAPH_CHECK(driver, memory_allocate(&memory, 8 << 20));
  abi::DevicePointer base = 0;
  size_t size = 0;
  PYGRAPH_CHECK(driver, memory_get_address_range(&base, &size, memory + 4096));
  EXPECT_EQ(base, memory);
  EXPECT_EQ(size, 8 << 20);
  PYGRAPH_CHECK(driver, memory_free(memory));
  EXPECT_NE(driver.memory_get_address_range(&base, &size, memory + 4096), abi::kSuccess);
}

TEST_F(DriverBehaviour, EndingACaptureThatWasNotBegunFails) {
  CUgraph raw = nullptr;
  EXPECT_EQ(driver.stream_end_capture(stream.get(), &raw), abi::kIllegalState);
}

TEST_F(DriverBehaviour, SynchronizingInvalidatesTheCaptureAndTheStreamRecovers) {
  PYGRAPH_CHECK(driver, stream_begin_capture(stream.get(), abi::kCaptureModeThreadLocal));
  EXPECT_EQ(driver.stream_synchronize(stream.get()), abi::kCaptureUnsupported);
  CUgraph raw = nullptr;
  EXPECT_EQ(driver.stream_end_capture(stream.get(), &raw), abi::kCaptureInvalidated);
  EXPECT_EQ(raw, nullptr);
  int status = -1;
  PYGRAPH_CHECK(driver, stream_is_capturing(stream.get(), &status));
  EXPECT_EQ(status, abi::kCaptureStatusNone);
}

TEST_F(DriverBehaviour, AGraphCannotBeLaunchedIntoACapture) {
  const uint64_t a = device.floats({1, 2});
  const Graph graph = capture([&] { device.add_constant(stream.get(), a, a, 2, 1); });
  CUgraphExec raw = nullptr;
  abi::InstantiateParams params{};
  PYGRAPH_CHECK(driver, graph_instantiate(&raw, graph.get(), &params));
  const GraphExec exec(driver, raw);
  PYGRAPH_CHECK(driver, stream_begin_capture(stream.get(), abi::kCaptureModeThreadLocal));
  EXPECT_EQ(driver.graph_launch(exec.get(), stream.get()), abi::kCaptureUnsupported);
  CUgraph captured = nullptr;
  driver.stream_end_capture(stream.get(), &captured);
  if (captured != nullptr) driver.graph_destroy(captured);
}

TEST_F(DriverBehaviour, AForkThatNeverJoinsIsRefused) {
  const uint64_t a = device.floats({1, 2});
  const Stream side = create_stream(driver);
  const Event fork = create_event(driver);
  PYGRAPH_CHECK(driver, stream_begin_capture(stream.get(), abi::kCaptureModeThreadLocal));
  PYGRAPH_CHECK(driver, event_record(fork.get(), stream.get()));
  PYGRAPH_CHECK(driver, stream_wait_event(side.get(), fork.get(), 0));
  device.add_constant(side.get(), a, a, 2, 1);
  CUgraph raw = nullptr;
  EXPECT_EQ(driver.stream_end_capture(stream.get(), &raw), abi::kCaptureUnjoined);
}

TEST_F(DriverBehaviour, ACloneHoldsTheSameNodes) {
  const uint64_t a = device.floats({1, 2});
  const Graph graph = capture([&] {
    device.add_constant(stream.get(), a, a, 2, 1);
    device.add_constant_packed(stream.get(), a, a, 2, 2);
  });
  CUgraph raw = nullptr;
  PYGRAPH_CHECK(driver, graph_clone(&raw, graph.get()));
  const Graph clone(driver, raw);
  Recording original = read_graph(driver, graph.get());
  retarget_nodes(driver, original, clone.get());
  const Recording copied = read_graph(driver, clone.get());
  ASSERT_EQ(copied.nodes.size(), original.nodes.size());
  for (size_t i = 0; i < copied.nodes.size(); ++i) {
    EXPECT_EQ(copied.nodes[i].handle, original.nodes[i].handle);
    EXPECT_EQ(copied.nodes[i].image, original.nodes[i].image);
  }
}

TEST_F(DriverBehaviour, ParametersWithMoreSharedMemoryThanTheFunctionsLimitAreRefused) {
  const uint64_t a = device.floats({1, 2});
  const Graph graph = capture([&] { device.add_constant(stream.get(), a, a, 2, 1); });
  const CUgraphNode node = read_graph(driver, graph.get()).nodes[0].handle;
  const CUfunction function = device.kernel("add_constant");
  abi::KernelNodeParams kernel{};
  PYGRAPH_CHECK(driver, graph_kernel_get_params(node, &kernel));
  kernel.shared_memory_bytes = 60000;
  EXPECT_EQ(driver.graph_kernel_set_params(node, &kernel), abi::kInvalidValue);
  PYGRAPH_CHECK(driver,
                function_set_attribute(function, abi::kFunctionMaxDynamicSharedBytes, 60000));
  EXPECT_EQ(driver.graph_kernel_set_params(node, &kernel), abi::kSuccess);
  PYGRAPH_CHECK(driver,
                function_set_attribute(function, abi::kFunctionMaxDynamicSharedBytes, 2048));
  EXPECT_EQ(driver.graph_kernel_set_params(node, &kernel), abi::kInvalidValue);
}

TEST_F(DriverBehaviour, UpdatingAnExecutableLeavesLaunchesInFlightAlone) {
  constexpr unsigned kCount = 4096;
  const uint64_t from = device.floats(std::vector<float>(kCount, 1));
  std::vector<uint64_t> results;
  for (int i = 0; i < 64; ++i) results.push_back(device.floats(std::vector<float>(kCount, 0)));
  Graph graph = capture([&] { device.add_constant(stream.get(), results[0], from, kCount, 1); });
  Recording recording = read_graph(driver, graph.get());
  const CUgraphNode node = recording.nodes[0].handle;
  CUgraphExec raw = nullptr;
  abi::InstantiateParams params{};
  PYGRAPH_CHECK(driver, graph_instantiate(&raw, graph.get(), &params));
  const GraphExec exec(driver, raw);
  abi::KernelNodeParams kernel{};
  PYGRAPH_CHECK(driver, graph_kernel_get_params(node, &kernel));
  for (uint64_t result : results) {
    unsigned count = kCount;
    uint64_t source = from;
    float value = 1;
    void* pointers[] = {&result, &source, &count, &value};
    kernel.kernel_params = pointers;
    PYGRAPH_CHECK(driver, graph_exec_kernel_set_params(exec.get(), node, &kernel));
    PYGRAPH_CHECK(driver, graph_launch(exec.get(), stream.get()));
  }
  for (const uint64_t result : results) {
    EXPECT_EQ(device.read_floats(result, kCount), std::vector<float>(kCount, 2));
  }
}

}  // namespace
}  // namespace pygraph::testing
