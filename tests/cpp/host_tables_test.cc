// Tables that an operator computes in pinned memory of its own and copies to the device: the graph
// copies the same bytes from memory of the device.
#include "pygraph/host_tables.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "test_device.h"

namespace pygraph::testing {
namespace {

constexpr unsigned kCount = 256;
constexpr uint64_t kBytes = kCount * sizeof(float);

class HostTablesTest : public DeviceTest {
 protected:
  void TearDown() override {
    for (const uint64_t address : kept) driver.memory_free(address);
  }
  std::span<float> pinned(float value, size_t count = kCount) {
    return device.pinned(count, value);
  }
  // result = input + a table, which is `tables[0]` in the first recording, `tables[1]` in the
  // other, and is read where the operator ends.
  void record(std::array<std::span<float>, 2> tables) {
    std::array<std::vector<HostTable>, 2> read;
    size_t run = 0;
    recordings = record_twice(device, {kBytes}, [&](Session& s) {
      const uint64_t on_device = s.pool.allocate(kBytes);
      PYGRAPH_CHECK(driver,
                    copy_to_device_async(on_device, tables.at(run).data(), kBytes, s.stream));
      const uint64_t result = s.pool.allocate(kBytes);
      device.add(s.stream, result, s.inputs[0], on_device, kCount);
      s.pool.free(on_device);
      read.at(run++) = read_tables(s.stream);
      return std::vector{result};
    });
    recordings.first.tables = read[0];
    recordings.second.tables = read[1];
  }
  // Of the graph that is being captured, all nodes.
  std::vector<HostTable> read_tables(CUstream capturing) {
    int status = 0;
    CUgraph graph = nullptr;
    PYGRAPH_CHECK(driver, stream_get_capture_info(capturing, &status, nullptr, &graph, nullptr,
                                                  nullptr, nullptr));
    return read_host_tables(driver, graph, 0, 1000);
  }
  LinkedGraph link() {
    const Surroundings around{
        .held = use_table_memory(driver, recordings.first, recordings.second, memory)};
    for (const Range& table : around.held) kept.insert(table.address);
    return pygraph::link(driver, recordings.first, recordings.second, {}, 1, around);
  }
  std::string refusal() {
    try {
      link();
    } catch (const NotRelocatable& error) {
      return error.what();
    }
    return "(not refused)";
  }
  // Calls with another input, output and workspace each time.
  void expect_sums(ExecutableGraph& graph, float table) {
    for (int i = 0; i < 30; ++i) {
      const auto value = static_cast<float>(i);
      const uint64_t input = device.floats(std::vector<float>(kCount, value));
      const uint64_t output = device.floats(std::vector<float>(kCount, 0));
      const uint64_t workspace = device.allocate(graph.linked().workspace_size);
      const uint64_t addresses[] = {input, output, workspace};
      graph.bind(addresses);
      graph.launch(stream.get());
      EXPECT_EQ(device.read_floats(output, kCount), std::vector<float>(kCount, value + table));
    }
  }

  TwoRecordings recordings;
  TableMemory memory{driver};
  std::set<uint64_t> kept;  // the addresses in it
};

TEST_F(HostTablesTest, AGraphCopiesWhatTheOperatorCopied) {
  const std::array tables = {pinned(5), pinned(5)};
  record(tables);
  for (const auto table : tables) std::ranges::fill(table, -1.0F);  // somebody else's by now
  const LinkedGraph linked = link();
  EXPECT_TRUE(linked.foreign.empty());
  ExecutableGraph graph(driver, std::move(recordings.graph), linked);
  expect_sums(graph, 5);
  expect_sums(*graph.copy(), 5);
}

TEST_F(HostTablesTest, TheGraphHasNoCopyFromTheHost) {
  record({pinned(5), pinned(5)});
  link();
  for (const Node& node : read_graph(driver, recordings.graph.get()).nodes) {
    if (node.kind != NodeKind::kMemcpy) continue;
    abi::Memcpy3D copy{};
    std::memcpy(&copy, node.image.data(), sizeof copy);
    EXPECT_EQ(copy.src_memory_type, abi::kMemoryTypeDevice);
    EXPECT_EQ(copy.src_device, *kept.begin());
    EXPECT_EQ(copy.width_bytes, kBytes);
  }
}

TEST_F(HostTablesTest, OnePieceOfMemoryForBothRecordingsIsEnough) {
  const auto table = pinned(5);
  record({table, table});
  ExecutableGraph graph(driver, std::move(recordings.graph), link());
  std::ranges::fill(table, -1.0F);
  expect_sums(graph, 5);
}

TEST_F(HostTablesTest, OtherContentsInTheOtherRecordingAreRefused) {
  const std::array tables = {pinned(5), pinned(5)};
  tables[1].back() = 6;
  record(tables);
  EXPECT_NE(refusal().find("a memcpy, uses other host memory"), std::string::npos) << refusal();
  EXPECT_TRUE(kept.empty());
}

TEST_F(HostTablesTest, OtherContentsAtOneAddressAreRefused) {
  const auto table = pinned(5);
  record({table, table});
  recordings.second.tables.front().bytes.back() ^= std::byte{1};
  EXPECT_NE(refusal().find("a copy uses memory of the host"), std::string::npos) << refusal();
}

TEST_F(HostTablesTest, WithoutTablesCopiesFromTheHostAreRefused) {
  record({pinned(5), pinned(5)});
  recordings.first.tables.clear();
  recordings.second.tables.clear();
  EXPECT_NE(refusal().find("uses other host memory"), std::string::npos) << refusal();
}

TEST_F(HostTablesTest, OnlyTablesOfTheOperatorsNodesAreRead) {
  const std::array tables = {pinned(1), pinned(2), pinned(3)};
  const uint64_t to = device.allocate(3 * kBytes);
  PYGRAPH_CHECK(driver, stream_begin_capture(stream.get(), abi::kCaptureModeThreadLocal));
  for (const auto table : tables) {
    PYGRAPH_CHECK(driver, copy_to_device_async(to, table.data(), kBytes, stream.get()));
  }
  CUgraph raw = nullptr;
  PYGRAPH_CHECK(driver, stream_end_capture(stream.get(), &raw));
  const Graph graph(driver, raw);
  const std::vector<HostTable> read = read_host_tables(driver, raw, 1, 2);
  ASSERT_EQ(read.size(), 1);
  EXPECT_EQ(read[0].position, 1);
  const auto bytes = std::as_bytes(tables[1]);
  EXPECT_TRUE(std::ranges::equal(read[0].bytes, bytes));
}

TEST_F(HostTablesTest, CopiesOfOtherKindsAreNotRead) {
  constexpr size_t kLarge = (size_t{1} << 20) / sizeof(float) + 1;
  std::vector<float> pageable(kCount);
  const auto large = pinned(1, kLarge);
  const uint64_t on_device = device.allocate(2 * kLarge * sizeof(float));
  PYGRAPH_CHECK(driver, stream_begin_capture(stream.get(), abi::kCaptureModeThreadLocal));
  PYGRAPH_CHECK(driver, copy_to_device_async(on_device, pageable.data(), kBytes, stream.get()));
  PYGRAPH_CHECK(driver,
                copy_to_device_async(on_device, large.data(), large.size_bytes(), stream.get()));
  PYGRAPH_CHECK(driver, copy_on_device_async(on_device, on_device + kBytes, kBytes, stream.get()));
  device.add_constant(stream.get(), on_device, on_device, 1, 1);
  CUgraph raw = nullptr;
  PYGRAPH_CHECK(driver, stream_end_capture(stream.get(), &raw));
  const Graph graph(driver, raw);
  EXPECT_TRUE(read_host_tables(driver, raw, 0, 4).empty());
}

TEST_F(HostTablesTest, EqualTablesAreKeptOnce) {
  const auto five = pinned(5);
  const auto six = pinned(6);
  const auto keep = [&](std::span<float> floats) {
    return *kept.insert(memory.keep(std::as_bytes(floats))).first;
  };
  const uint64_t address = keep(five);
  EXPECT_EQ(device.read_floats(address, kCount), std::vector<float>(kCount, 5));
  EXPECT_NE(keep(six), address);
  EXPECT_NE(keep(five.first(4)), address);
  std::ranges::fill(six, 5.0F);
  EXPECT_EQ(keep(six), address);
}

TEST_F(HostTablesTest, EveryCallMayFailAndNothingIsLeftBehind) {
  if (!device.is_simulated()) GTEST_SKIP() << "needs failure injection";
  record({pinned(5), pinned(5)});
  const Recording first = recordings.first;
  const Recording second = recordings.second;
  size_t free_before = 0;
  size_t free = 0;
  size_t total = 0;
  PYGRAPH_CHECK(driver, memory_get_info(&free_before, &total));
  for (const char* symbol :
       {"cuMemAlloc", "cuStreamCreate", "cuMemcpyHtoDAsync", "cuStreamSynchronize"}) {
    const size_t live = device.simulator().live_objects();
    device.simulator().fail(symbol, 1, abi::kOutOfMemory);
    EXPECT_THROW(link(), DriverError) << symbol;
    EXPECT_EQ(device.simulator().live_objects(), live) << symbol;
    PYGRAPH_CHECK(driver, memory_get_info(&free, &total));
    EXPECT_EQ(free, free_before) << symbol;
  }
  device.simulator().fail("cuGraphMemcpyNodeSetParams", 1, abi::kInvalidValue);
  EXPECT_THROW(link(), DriverError);
  recordings.first = first;
  recordings.second = second;
  ExecutableGraph graph(driver, std::move(recordings.graph), link());
  expect_sums(graph, 5);
  for (const char* symbol :
       {"cuGraphGetNodes", "cuGraphNodeGetType", "cuGraphMemcpyNodeGetParams"}) {
    record({pinned(5), pinned(5)});
    device.simulator().fail(symbol, 1, abi::kOutOfMemory);
    EXPECT_THROW(read_host_tables(driver, recordings.graph.get(), 0, 2), DriverError) << symbol;
  }
}

// What the engine relies on, and what it avoids.
TEST_F(HostTablesTest, OnlyTheGraphItselfTurnsACopyIntoAnother) {
  const auto table = pinned(5);
  const uint64_t on_device = device.floats(std::vector<float>(kCount, 6));
  const uint64_t to = device.allocate(kBytes);
  PYGRAPH_CHECK(driver, stream_begin_capture(stream.get(), abi::kCaptureModeThreadLocal));
  PYGRAPH_CHECK(driver, copy_to_device_async(to, table.data(), kBytes, stream.get()));
  CUgraph raw = nullptr;
  PYGRAPH_CHECK(driver, stream_end_capture(stream.get(), &raw));
  const Graph graph(driver, raw);
  const CUgraphNode node = read_graph(driver, raw).nodes[0].handle;
  abi::Memcpy3D copy{};
  PYGRAPH_CHECK(driver, graph_memcpy_get_params(node, &copy));
  EXPECT_EQ(copy.src_memory_type, abi::kMemoryTypeHost);
  EXPECT_EQ(copy.src_host, table.data());
  const auto instantiate = [&] {
    CUgraphExec exec = nullptr;
    abi::InstantiateParams params{};
    PYGRAPH_CHECK(driver, graph_instantiate(&exec, raw, &params));
    return GraphExec(driver, exec);
  };
  const GraphExec from_host = instantiate();
  copy.src_memory_type = abi::kMemoryTypeDevice;
  copy.src_host = nullptr;
  copy.src_device = on_device;
  CUcontext context = nullptr;
  PYGRAPH_CHECK(driver, context_get_current(&context));
  EXPECT_EQ(driver.graph_exec_memcpy_set_params(from_host.get(), node, &copy, context),
            abi::kInvalidValue);
  PYGRAPH_CHECK(driver, graph_memcpy_set_params(node, &copy));
  const GraphExec on_device_only = instantiate();
  PYGRAPH_CHECK(driver, graph_launch(on_device_only.get(), stream.get()));
  EXPECT_EQ(device.read_floats(to, kCount), std::vector<float>(kCount, 6));
}

}  // namespace
}  // namespace pygraph::testing
