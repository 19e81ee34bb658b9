#include "pygraph/record.h"

#include "test_device.h"

namespace pygraph::testing {
namespace {

constexpr unsigned kCount = 128;
constexpr uint64_t kBytes = kCount * sizeof(float);

class RecordTest : public DeviceTest {
 protected:
  void SetUp() override {  // load the kernels: lazy loading is not allowed while capturing
    const uint64_t a = device.floats(std::vector<float>(kCount, 0));
    device.add(stream.get(), a, a, a, kCount);
    device.add_constant(stream.get(), a, a, kCount, 0);
    device.synchronize();
  }
};

TEST_F(RecordTest, ReplaysOnBuffersItNeverSaw) {
  const Buffer buffers[] = {{kBytes}, {kBytes}, {kBytes}};
  const auto graph = record(driver, 0, buffers, [&](CUstream s, auto addresses) {
    device.add(s, addresses[2], addresses[0], addresses[1], kCount);
    device.add_constant(s, addresses[2], addresses[2], kCount, 1);
  });
  for (const float value : {1.0F, 2.0F, 3.0F}) {
    const uint64_t out = device.floats(std::vector<float>(kCount, 0));
    const uint64_t addresses[] = {device.floats(std::vector<float>(kCount, value)),
                                  device.floats(std::vector<float>(kCount, 10)), out, 0};
    graph->bind(addresses);
    graph->launch(stream.get());
    EXPECT_EQ(device.read_floats(out, kCount), std::vector<float>(kCount, value + 11));
  }
}

TEST_F(RecordTest, AnExceptionOfTheCallerPassesThroughAndLeavesNothingBehind) {
  const size_t before = device.is_simulated() ? device.simulator().live_objects() : 0;
  const Buffer buffers[] = {{kBytes}};
  EXPECT_THROW(record(driver, 0, buffers,
                      [&](CUstream s, auto addresses) {
                        device.add_constant(s, addresses[0], addresses[0], kCount, 1);
                        throw std::out_of_range("the caller's own");
                      }),
               std::out_of_range);
  const size_t after = device.is_simulated() ? device.simulator().live_objects() : 0;
  EXPECT_EQ(after, before);
}

TEST_F(RecordTest, RefusesWhatOnlyVerificationCouldAccept) {
  const Buffer buffers[] = {{kBytes}};
  const auto work = [&](CUstream s, auto addresses) {
    device.add_one_struct(s, addresses[0], addresses[0] + kBytes + 64, addresses[0], kCount);
  };
  EXPECT_THROW(record(driver, 0, buffers, work), NotRelocatable);
}

TEST_F(RecordTest, SynchronizingWhileRecordingIsRefused) {
  const Buffer buffers[] = {{kBytes}};
  const auto work = [&](CUstream s, auto addresses) {
    device.add_constant(s, addresses[0], addresses[0], kCount, 1);
    driver.stream_synchronize(s);
  };
  EXPECT_THROW(record(driver, 0, buffers, work), DriverError);
}

}  // namespace
}  // namespace pygraph::testing
