// Copies from pinned memory that an operator gives back: the graph reads the same bytes from memory
// that is kept.
#include "pygraph/host_constants.h"

#include <algorithm>

#include "test_device.h"

namespace pygraph::testing {
namespace {

constexpr unsigned kCount = 256;
constexpr uint64_t kBytes = kCount * sizeof(float);

class HostConstantsTest : public DeviceTest {
 protected:
  std::span<float> pinned(float value) {
    void* memory = nullptr;  // never freed: the driver's table has no function for it
    PYGRAPH_CHECK(driver, memory_allocate_host(&memory, kBytes, 0));
    const std::span<float> floats(static_cast<float*>(memory), kCount);
    std::ranges::fill(floats, value);
    return floats;
  }
  // result = input + a table, of which each recording has its own, filled with `values`.
  void record(std::array<float, 2> values) {
    size_t run = 0;
    recordings = record_twice(device, {kBytes}, [&](Session& s) {
      const uint64_t on_device = s.pool.allocate(kBytes);
      tables.push_back(pinned(values.at(run++)));
      PYGRAPH_CHECK(driver,
                    copy_to_device_async(on_device, tables.back().data(), kBytes, s.stream));
      const uint64_t result = s.pool.allocate(kBytes);
      device.add(s.stream, result, s.inputs[0], on_device, kCount);
      return std::vector{result};
    });
    for (Recording* recording : {&recordings.first, &recordings.second}) {
      recording->operators = {{.name = "my::op", .last = 2}};
    }
  }
  // Returns how many copies were changed, in both recordings.
  size_t keep(bool is_accepted = true) {
    const auto copies_constants = [&](const Operator& op) {
      EXPECT_EQ(op.name, "my::op");
      return is_accepted;
    };
    size_t count =
        keep_host_constants(driver, recordings.first, constants, copies_constants).size();
    for (const uint32_t index :
         keep_host_constants(driver, recordings.second, constants, copies_constants)) {
      const Node& node = recordings.second.nodes[index];
      const auto* params = reinterpret_cast<const abi::Memcpy3D*>(node.image.data());
      PYGRAPH_CHECK(driver, graph_memcpy_set_params(node.handle, params));
      ++count;
    }
    return count;
  }
  LinkedGraph link() {
    const Surroundings around{.held = constants.ranges()};
    return pygraph::link(driver, recordings.first, recordings.second, {}, 1, around);
  }

  TwoRecordings recordings;
  std::vector<std::span<float>> tables;
  HostConstants constants{driver};
};

TEST_F(HostConstantsTest, AGraphReadsWhatTheOperatorCopied) {
  record({5, 5});
  EXPECT_EQ(keep(), 2);
  EXPECT_EQ(constants.ranges().size(), 1);
  ExecutableGraph graph(driver, std::move(recordings.graph), link());
  for (const auto table : tables) std::ranges::fill(table, -1.0F);  // somebody else's by now
  const uint64_t workspace = device.allocate(graph.linked().workspace_size);
  for (const float value : {1.0F, 2.0F}) {
    const uint64_t input = device.floats(std::vector<float>(kCount, value));
    const uint64_t output = device.floats(std::vector<float>(kCount, 0));
    const uint64_t addresses[] = {input, output, workspace};
    graph.bind(addresses);
    graph.launch(stream.get());
    EXPECT_EQ(device.read_floats(output, kCount), std::vector<float>(kCount, value + 5));
  }
}

TEST_F(HostConstantsTest, ContentsThatDifferAreRefused) {
  record({5, 6});
  EXPECT_EQ(keep(), 2);
  EXPECT_THROW(link(), NotRelocatable);
}

TEST_F(HostConstantsTest, OtherOperatorsAreLeftAlone) {
  record({5, 5});
  EXPECT_EQ(keep(false), 0);
  EXPECT_TRUE(constants.ranges().empty());
  EXPECT_THROW(link(), NotRelocatable);
}

TEST_F(HostConstantsTest, MemoryThatIsNotPinnedIsNotRead) {
  record({5, 5});
  for (Recording* recording : {&recordings.first, &recordings.second}) {
    for (Node& node : recording->nodes) {
      if (node.kind != NodeKind::kMemcpy) continue;
      auto* params = reinterpret_cast<abi::Memcpy3D*>(node.image.data());
      params->src_host = reinterpret_cast<const void*>(0x2000);
      params->src_device = 0x2000;
    }
  }
  EXPECT_EQ(keep(), 0);
}

TEST_F(HostConstantsTest, EqualBytesAreKeptOnce) {
  const auto a = pinned(1);
  const auto b = pinned(2);
  const void* kept = constants.keep(std::as_bytes(a));
  EXPECT_NE(kept, a.data());
  EXPECT_NE(constants.keep(std::as_bytes(b)), kept);
  std::ranges::fill(b, 1.0F);
  EXPECT_EQ(constants.keep(std::as_bytes(b)), kept);
  EXPECT_EQ(constants.ranges().size(), 2);
}

}  // namespace
}  // namespace pygraph::testing
