// Every driver call that recording and replaying make is made to fail once, each time it is made:
// the failure must come out as an exception and nothing may be left behind.
#include <map>

#include "pygraph/address_space.h"
#include "test_device.h"

namespace pygraph::testing {
namespace {

constexpr unsigned kCount = 64;
constexpr uint64_t kBytes = kCount * sizeof(float);

const char* const kSymbols[] = {
#define PYGRAPH_SYMBOL(member, symbol, version, ...) symbol,
    PYGRAPH_DRIVER_FUNCTIONS(PYGRAPH_SYMBOL)
#undef PYGRAPH_SYMBOL
};

class FailureTest : public DeviceTest {
 protected:
  void SetUp() override {
    if (!device.is_simulated()) GTEST_SKIP() << "needs failure injection";
    input = device.floats(std::vector<float>(kCount, 1));
    output = device.floats(std::vector<float>(kCount, 0));
  }
  void record_and_replay() {
    const Buffer buffers[] = {{kBytes}, {kBytes}};
    const auto graph = record(driver, 0, buffers, [&](CUstream s, auto addresses) {
      device.add_constant(s, addresses[1], addresses[0], kCount, 1);
      PYGRAPH_CHECK(driver, copy_on_device_async(addresses[0], addresses[1], kBytes, s));
      PYGRAPH_CHECK(driver, memset_d8_async(addresses[0], 0, kBytes, s));
    });
    const uint64_t addresses[] = {input, output, 0};
    graph->bind(addresses);
    const uint64_t swapped[] = {output, input, 0};
    graph->bind(swapped);
    graph->launch(stream.get());
    const auto copy = graph->copy();
    for (const auto* now : {&addresses, &swapped}) {
      copy->bind(*now);
      copy->launch(stream.get());
    }
  }
  // Calls whose failure the engine answers by itself: clean-up, which must not throw, and the
  // driver's way of saying "no more parameters".
  static bool is_tolerated(const std::string& symbol) {
    for (const char* word : {"Destroy", "Unmap", "Release", "Free", "Unload",
                             "ExchangeStreamCapture", "GetErrorName", "GetParamInfo"}) {
      if (symbol.find(word) != std::string::npos) return true;
    }
    return false;
  }
  uint64_t input = 0;
  uint64_t output = 0;
};

TEST_F(FailureTest, EveryCallMayFailAndNothingIsLeftBehind) {
  std::map<std::string, int> calls;  // that one run makes
  for (const char* symbol : kSymbols) calls[symbol] = -device.simulator().calls(symbol);
  record_and_replay();
  for (const char* symbol : kSymbols) calls[symbol] += device.simulator().calls(symbol);
  int injected = 0;
  for (const char* symbol : kSymbols) {
    if (is_tolerated(symbol)) continue;
    for (int nth = 1; nth <= calls[symbol]; ++nth) {
      const size_t live = device.simulator().live_objects();
      device.simulator().fail(symbol, nth, abi::kOutOfMemory);
      EXPECT_THROW(record_and_replay(), DriverError) << symbol << ", call " << nth;
      EXPECT_EQ(device.simulator().live_objects(), live) << symbol << ", call " << nth;
      ++injected;
    }
  }
  EXPECT_GT(injected, 50);
  record_and_replay();
}

TEST_F(FailureTest, AKernelWithoutParameterInfoIsNotReplayedWrongly) {
  device.simulator().fail("cuFuncGetParamInfo", 1, abi::kInvalidValue);
  EXPECT_THROW(record_and_replay(), NotRelocatable);
}

TEST_F(FailureTest, AddressesInAPackedBufferAreFoundWithoutParameterInfoToo) {
  TwoRecordings recordings = record_twice(device, {kBytes}, [&](Session& s) {
    const uint64_t result = s.pool.allocate(kBytes);
    device.add_constant_packed(s.stream, result, s.inputs[0], kCount, 1);
    return std::vector<uint64_t>{result};
  });
  for (int call = 1; call <= 5; ++call) {
    device.simulator().fail("cuFuncGetParamInfo", call, abi::kOutOfMemory);
    EXPECT_EQ(recordings.link(driver).relocations.size(), 2) << call;
  }
}

TEST_F(FailureTest, PagesAreCheckedWithoutPinnedMemoryToo) {
  device.simulator().fail("cuMemHostAlloc", 1, abi::kOutOfMemory);
  AddressSpace space(driver, 0, 64 << 20, 512);
  const uint64_t address = space.allocate(4096, 0, AddressSpace::Content::kOther);
  space.poison();
  EXPECT_TRUE(space.untouched());
  const float value = 7;
  device.write_bytes(address, &value, sizeof value);
  EXPECT_FALSE(space.untouched());
}

// Without memory for a larger page, the smaller ones do; any other failure comes out.
TEST_F(FailureTest, EveryCallThatMapsLargerPagesMayFail) {
  const auto map = [&] {
    AddressSpace space(driver, 0, uint64_t{16} << 30, AddressSpace::kIrregularGaps);
    for (const uint64_t mib : {1, 100, 200, 4000, 100, 1}) {
      space.allocate(mib << 20, 0, AddressSpace::Content::kFloating);
    }
    space.poison();
    EXPECT_TRUE(space.untouched());
  };
  for (const char* symbol : {"cuMemCreate", "cuMemMap", "cuMemSetAccess"}) {
    const int before = device.simulator().calls(symbol);
    map();
    const int calls = device.simulator().calls(symbol) - before;
    EXPECT_GE(calls, 4);
    for (int nth = 1; nth <= calls; nth += nth < 60 ? 1 : 97) {
      const size_t live = device.simulator().live_objects();
      device.simulator().fail(symbol, nth, abi::kOutOfMemory);
      const bool is_larger_page = std::string(symbol) == "cuMemCreate" && nth > 2;
      if (is_larger_page) {
        EXPECT_NO_THROW(map()) << symbol << ", call " << nth;
      } else {
        EXPECT_THROW(map(), DriverError) << symbol << ", call " << nth;
      }
      device.simulator().forget_failures();
      EXPECT_EQ(device.simulator().live_objects(), live) << symbol << ", call " << nth;
    }
  }
}

TEST_F(FailureTest, OnlySomeErrorsEndTheProcess) {
  EXPECT_TRUE(DriverError("", 700).sticky());
  EXPECT_FALSE(DriverError("", abi::kOutOfMemory).sticky());
  EXPECT_FALSE(DriverError("", abi::kCaptureInvalidated).sticky());
}

// Stand-ins for the entry point of libcuda, as drivers that are too old or no drivers would have
// it.
int g_version = 0;
const char* g_missing = "";

abi::Result tell_version(int* version) {
  *version = g_version;
  return abi::kSuccess;
}

abi::Result find_any_function(const char* symbol, void** function, int /*version*/,
                              uint64_t /*flags*/, int* /*status*/) {
  // The driver answers "success" with a null function for names it does not know.
  const bool is_missing = std::string(symbol) == g_missing;
  *function = is_missing ? nullptr : reinterpret_cast<void*>(&tell_version);
  return abi::kSuccess;
}

abi::Result answer_like_the_stub(const char* /*symbol*/, void** /*function*/, int /*version*/,
                                 uint64_t /*flags*/, int* /*status*/) {
  return abi::kStubLibrary;
}

std::string reason_not_to_load(GetProcAddress get) {
  try {
    load_driver(get);
  } catch (const DriverError& error) {
    return error.what();
  }
  return "(loaded)";
}

TEST(DriverTest, AnOldDriverIsRefusedWithBothVersions) {
  g_version = 12030;
  EXPECT_EQ(reason_not_to_load(find_any_function),
            "the CUDA driver supports CUDA 12.3; PyGraph needs 12.4 (cuFuncGetParamInfo)");
}

TEST(DriverTest, AMissingFunctionIsNamed) {
  g_version = 13000;
  g_missing = "cuGraphLaunch";
  EXPECT_EQ(reason_not_to_load(find_any_function),
            "the CUDA driver has no cuGraphLaunch of version 10.0; PyGraph needs driver 12.4");
  g_missing = "";
  EXPECT_EQ(reason_not_to_load(find_any_function), "(loaded)");
}

TEST(DriverTest, TheToolkitsStubIsNoDriver) {
  EXPECT_EQ(reason_not_to_load(answer_like_the_stub),
            "libcuda.so.1 is the toolkit's stub, not a driver");
}

TEST(DriverTest, AMissingDriverIsAnExceptionWithTheReason) {
  try {
    cuda_driver();
    GTEST_SKIP() << "this machine has a driver";
  } catch (const DriverError& error) {
    EXPECT_NE(std::string(error.what()).find("libcuda.so.1"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace pygraph::testing
