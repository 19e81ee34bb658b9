#include "pygraph/stream_slots.h"

#include <set>

#include "test_device.h"

namespace pygraph::testing {
namespace {

constexpr unsigned kCount = 256;
constexpr uint64_t kBytes = kCount * sizeof(float);

// What is not known on a GPU, when a stream is done, is told to the simulator.
class StreamSlotsTest : public DeviceTest {
 protected:
  void SetUp() override {
    if (!device.is_simulated()) GTEST_SKIP() << "needs the simulated driver";
  }
  Stream new_stream() { return create_stream(driver); }
  CallStream call(const Stream& on, bool is_permanent = false) { return {on.get(), is_permanent}; }
  // A call as a graph makes it; the slot, or nothing where it runs uncaptured.
  std::optional<size_t> launch(StreamSlots& slots, CallStream on) {
    const auto choice = slots.choose(on);
    if (!choice) return std::nullopt;
    slots.launched(choice->slot, on.handle);
    return choice->slot;
  }
  const Stream a = new_stream();
  const Stream b = new_stream();
};

TEST_F(StreamSlotsTest, OneStreamCostsNoCallOfTheDriverAfterTheFirst) {
  StreamSlots slots(driver, 8);
  EXPECT_EQ(launch(slots, call(a, true)), 0);
  const int ids = device.simulator().calls("cuStreamGetId");
  for (int i = 0; i < 100; ++i) EXPECT_EQ(launch(slots, call(a, true)), 0);
  EXPECT_EQ(device.simulator().calls("cuStreamGetId"), ids);
  EXPECT_EQ(device.simulator().calls("cuEventRecord"), 0);
  EXPECT_EQ(device.simulator().calls("cuEventQuery"), 0);
}

TEST_F(StreamSlotsTest, AnotherStreamGetsASlotOfItsOwnAtItsSecondCall) {
  StreamSlots slots(driver, 8);
  device.simulator().hold(a.get(), true);
  device.simulator().hold(b.get(), true);
  EXPECT_EQ(launch(slots, call(a)), 0);
  EXPECT_EQ(launch(slots, call(b)), std::nullopt);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(launch(slots, call(b)), 1);
    EXPECT_EQ(launch(slots, call(a)), 0);
  }
}

TEST_F(StreamSlotsTest, NothingEverWaits) {
  StreamSlots slots(driver, 2);
  std::vector<Stream> streams;
  for (int i = 0; i < 20; ++i) {
    streams.push_back(new_stream());
    device.simulator().hold(streams.back().get(), true);
  }
  for (int round = 0; round < 3; ++round) {
    for (const Stream& each : streams) launch(slots, call(each));
  }
  EXPECT_EQ(device.simulator().calls("cuStreamWaitEvent"), 0);
  EXPECT_EQ(device.simulator().calls("cuStreamSynchronize"), 0);
  EXPECT_EQ(device.simulator().calls("cuCtxSynchronize"), 0);
}

TEST_F(StreamSlotsTest, ASlotChangesHandsWhenItsLastLaunchIsComplete) {
  StreamSlots slots(driver, 1);
  device.simulator().hold(a.get(), true);
  EXPECT_EQ(launch(slots, call(a)), 0);
  EXPECT_EQ(launch(slots, call(b)), std::nullopt);
  EXPECT_EQ(launch(slots, call(a)), 0);  // watched from now on
  for (int i = 0; i < 3; ++i) EXPECT_EQ(launch(slots, call(b)), std::nullopt);
  device.simulator().hold(a.get(), false);
  const auto choice = slots.choose(call(b));
  ASSERT_TRUE(choice.has_value());
  EXPECT_TRUE(choice->has_moved);
}

TEST_F(StreamSlotsTest, ALaunchThatWasNotWatchedKeepsItsSlot) {
  StreamSlots slots(driver, 1);
  EXPECT_EQ(launch(slots, call(a)), 0);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(launch(slots, call(b)), std::nullopt);
  EXPECT_EQ(launch(slots, call(a)), 0);  // watched from now on
  EXPECT_EQ(launch(slots, call(b)), 0);
}

TEST_F(StreamSlotsTest, AStreamThatWasDestroyedIsNotTouchedAndItsSlotIsUsedAgain) {
  StreamSlots slots(driver, 2);
  std::set<uint64_t> ids;
  for (int i = 0; i < 50; ++i) {
    const Stream passing = new_stream();  // often at the address of the one before
    for (int call_index = 0; call_index < 3; ++call_index) {
      const auto choice = slots.choose(call(passing));
      if (!choice) continue;
      EXPECT_EQ(choice->has_moved, ids.insert(choice->stream_id).second);
      slots.launched(choice->slot, passing.get());
    }
  }
  EXPECT_GE(ids.size(), 49);
  EXPECT_LE(slots.size(), 2);
}

TEST_F(StreamSlotsTest, AnEventThatCannotBeHadIsNoErrorOfTheLaunch) {
  StreamSlots slots(driver, 1);
  EXPECT_EQ(launch(slots, call(a)), 0);
  EXPECT_EQ(launch(slots, call(b)), std::nullopt);
  device.simulator().fail("cuEventCreate", 1, abi::kOutOfMemory);
  EXPECT_EQ(launch(slots, call(a)), 0);
  EXPECT_EQ(launch(slots, call(b)), std::nullopt);
  EXPECT_EQ(launch(slots, call(a)), 0);
}

TEST_F(StreamSlotsTest, NoFurtherSlotsAfterOneCouldNotBeSetUp) {
  StreamSlots slots(driver, 8);
  device.simulator().hold(a.get(), true);
  launch(slots, call(a));
  launch(slots, call(b));
  ASSERT_EQ(slots.choose(call(b))->slot, 1);
  slots.drop_last();
  slots.limit();
  EXPECT_EQ(launch(slots, call(a)), 0);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(launch(slots, call(b)), std::nullopt);
}

// Copies of one executable, each bound to memory of its own stream, do not disturb each other.
TEST_F(StreamSlotsTest, ExecutablesOfSeveralStreamsKeepTheirOwnAddresses) {
  TwoRecordings recordings = record_twice(device, {kBytes}, [&](Session& s) {
    const uint64_t middle = s.pool.allocate(kBytes);
    device.add_constant(s.stream, middle, s.inputs[0], kCount, 1);
    const uint64_t result = s.pool.allocate(kBytes);
    device.add_constant(s.stream, result, middle, kCount, 1);
    s.pool.free(middle);
    return std::vector{result};
  });
  LinkedGraph linked = recordings.link(driver);
  std::vector<std::unique_ptr<ExecutableGraph>> executables;
  executables.push_back(
      std::make_unique<ExecutableGraph>(driver, std::move(recordings.graph), std::move(linked)));
  executables.front()->bind(std::vector<uint64_t>(executables.front()->slot_count(), kBytes));
  for (int i = 0; i < 3; ++i) executables.push_back(executables.front()->copy());
  const uint64_t size = executables.front()->linked().workspace_size;
  std::vector<std::array<uint64_t, 3>> bound;
  for (size_t i = 0; i < executables.size(); ++i) {
    const uint64_t input = device.floats(std::vector<float>(kCount, static_cast<float>(i)));
    bound.push_back({input, device.floats(std::vector<float>(kCount)), device.allocate(size)});
    executables[i]->bind(bound.back());
  }
  for (size_t i = executables.size(); i-- > 0;) executables[i]->launch(stream.get());
  for (size_t i = 0; i < executables.size(); ++i) {
    EXPECT_EQ(device.read_floats(bound[i][1], kCount),
              std::vector<float>(kCount, static_cast<float>(i + 2)));
  }
}

TEST_F(StreamSlotsTest, PrioritiesOfKernelsAreKept) {
  for (const int priority : {0, -5}) {
    TwoRecordings recordings = record_twice(device, {kBytes}, [&](Session& s) {
      const uint64_t result = s.pool.allocate(kBytes);
      device.add_constant(s.stream, result, s.inputs[0], kCount, 1);
      return std::vector{result};
    });
    LinkedGraph linked = recordings.link(driver);
    abi::LaunchAttributeValue value{};
    value.priority = priority;
    const CUgraphNode node = linked.recording.nodes.front().handle;
    ASSERT_EQ(driver.graph_kernel_set_attribute(node, abi::kLaunchAttributePriority, &value), 0);
    ExecutableGraph graph(driver, std::move(recordings.graph), std::move(linked));
    graph.bind(std::vector<uint64_t>(graph.slot_count(), device.allocate(kBytes)));
    EXPECT_EQ(device.simulator().last_executable_flags(),
              priority == 0 ? 0 : abi::kInstantiateUseNodePriority);
  }
}

}  // namespace
}  // namespace pygraph::testing
