// The engine's half of verification: an address that relocation cannot see is caught by poison.
#include "test_device.h"

namespace pygraph::testing {
namespace {

constexpr unsigned kCount = 64;
constexpr uint64_t kBytes = kCount * sizeof(float);

class VerificationTest : public DeviceTest {
 protected:
  // result = *table + 1, where the table in device memory holds the address of a stand-in.
  std::unique_ptr<ExecutableGraph> hidden_read(uint64_t table) {
    recordings = record_twice(device, {kBytes}, [&](Session& s) {
      const uint64_t result = s.pool.allocate(kBytes);
      hidden = s.inputs[0];
      device.add_one_hidden(s.stream, result, table, kCount);
      return std::vector{result};
    });
    device.write_bytes(table, &hidden, sizeof hidden);
    LinkedGraph linked = recordings.link(driver);
    return std::make_unique<ExecutableGraph>(driver, std::move(recordings.graph),
                                             std::move(linked));
  }
  TwoRecordings recordings;
  uint64_t hidden = 0;
};

TEST_F(VerificationTest, AHiddenReadGivesGarbageInsteadOfAFault) {
  const auto graph = hidden_read(device.allocate(8));
  recordings.space_b->poison();
  const uint64_t input = device.floats(std::vector<float>(kCount, 1));
  const uint64_t output = device.floats(std::vector<float>(kCount, 0));
  const uint64_t addresses[] = {input, output, 0};
  graph->bind(addresses);
  graph->launch(stream.get());
  for (const float value : device.read_floats(output, kCount)) EXPECT_NE(value, value);
}

TEST_F(VerificationTest, AHiddenWriteTouchesThePage) {
  const uint64_t source = device.floats(std::vector<float>(kCount, 1));
  TwoRecordings two = record_twice(device, {kBytes}, [&](Session& s) {
    device.add_constant(s.stream, s.inputs[0], source, kCount, 1);
    return std::vector<uint64_t>{};
  });
  // Replayed without being relocated, as if the scan had missed the address.
  CUgraphExec raw = nullptr;
  abi::InstantiateParams params{};
  PYGRAPH_CHECK(driver, graph_instantiate(&raw, two.graph.get(), &params));
  const GraphExec exec(driver, raw);
  two.space_b->poison();
  EXPECT_TRUE(two.space_b->untouched());
  PYGRAPH_CHECK(driver, graph_launch(exec.get(), stream.get()));
  device.synchronize();
  EXPECT_FALSE(two.space_b->untouched());
}

}  // namespace
}  // namespace pygraph::testing
