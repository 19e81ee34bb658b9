// Which copies are tables, is told by the operators that make them.
#include "record/table_log.h"

#include <algorithm>

#include "test_device.h"

namespace pygraph::testing {
namespace {

constexpr unsigned kCount = 256;
constexpr uint64_t kBytes = kCount * sizeof(float);

class TableLogTest : public DeviceTest {
 protected:
  // Captures `work` with a log, and returns the positions of the tables.
  std::vector<uint32_t> positions(const std::function<void(bindings::TableLog&)>& work) {
    bindings::TableLog log(driver, stream.get());
    PYGRAPH_CHECK(driver, stream_begin_capture(stream.get(), abi::kCaptureModeThreadLocal));
    work(log);
    CUgraph raw = nullptr;
    PYGRAPH_CHECK(driver, stream_end_capture(stream.get(), &raw));
    const Graph graph(driver, raw);
    tables = log.take();
    std::vector<uint32_t> found;
    for (const HostTable& table : tables) found.push_back(table.position);
    return found;
  }
  void copy() {
    PYGRAPH_CHECK(driver, copy_to_device_async(to, source.data(), kBytes, stream.get()));
  }
  std::span<float> source = device.pinned(kCount, 5);
  uint64_t to = device.allocate(kBytes);
  std::vector<HostTable> tables;
};

TEST_F(TableLogTest, ListedOperatorsCopyTables) {
  const std::vector<uint32_t> found = positions([&](bindings::TableLog& log) {
    copy();
    for (const char* name : {"aten::add", "aten::_foreach_norm", "my::_foreach_norm",
                             "aten::_foreach_max", "aten::_foreach_powsum", "aten::_chunk_cat"}) {
      log.enter(name);
      copy();
      log.leave(name);
    }
    copy();
  });
  EXPECT_EQ(found, (std::vector<uint32_t>{2, 4, 5}));
}

TEST_F(TableLogTest, AnOperatorInsideOfOthersCountsWithAllThatItCalls) {
  const std::vector<uint32_t> found = positions([&](bindings::TableLog& log) {
    log.enter("my::clip");
    copy();
    log.enter("aten::_foreach_norm");
    log.enter("aten::copy_");
    copy();
    log.leave("aten::copy_");
    log.enter("aten::_foreach_max");
    copy();
    log.leave("aten::_foreach_max");
    copy();
    log.leave("aten::_foreach_norm");
    copy();
    log.leave("my::clip");
  });
  EXPECT_EQ(found, (std::vector<uint32_t>{1, 2, 3}));
}

TEST_F(TableLogTest, WhatTheProgramCopiesInsideOfAnOperatorIsNoTable) {
  for (const char* own : {"PythonDispatchMode", "PythonSubclass", "my::operator"}) {
    const std::vector<uint32_t> found = positions([&](bindings::TableLog& log) {
      log.enter("aten::_foreach_norm");
      log.enter(own);
      log.enter("aten::copy_");  // of a tensor of the program's, whose contents may change
      copy();
      log.leave("aten::copy_");
      log.enter("aten::_foreach_norm");
      copy();
      log.leave("aten::_foreach_norm");
      log.leave(own);
      log.leave("aten::_foreach_norm");
      log.enter("aten::_foreach_norm");
      copy();
      log.leave("aten::_foreach_norm");
    });
    EXPECT_EQ(found, (std::vector<uint32_t>{2})) << own;
  }
}

TEST_F(TableLogTest, WhatAReplacedKernelCopiesIsNoTable) {
  const std::vector<uint32_t> found = positions([&](bindings::TableLog& log) {
    log.enter("aten::_foreach_norm", /*is_own=*/false);
    copy();
    log.leave("aten::_foreach_norm");
    log.enter("aten::_foreach_max");
    log.enter("aten::_foreach_norm", /*is_own=*/false);
    copy();
    log.leave("aten::_foreach_norm");
    log.leave("aten::_foreach_max");
    log.enter("aten::_foreach_max");
    copy();
    log.leave("aten::_foreach_max");
  });
  EXPECT_EQ(found, (std::vector<uint32_t>{2}));
}

TEST_F(TableLogTest, TheBytesAreThoseAtTheOperatorsEnd) {
  positions([&](bindings::TableLog& log) {
    log.enter("aten::_foreach_norm");
    copy();
    std::ranges::fill(source, 6.0F);  // nothing has been copied yet
    log.leave("aten::_foreach_norm");
    std::ranges::fill(source, 7.0F);  // somebody else's
  });
  ASSERT_EQ(tables.size(), 1);
  const std::vector<float> expected(kCount, 6);
  EXPECT_TRUE(std::ranges::equal(tables[0].bytes, std::as_bytes(std::span(expected))));
}

TEST_F(TableLogTest, WithoutACaptureNothingIsRead) {
  bindings::TableLog log(driver, stream.get());
  log.enter("aten::_foreach_norm");
  copy();
  log.leave("aten::_foreach_norm");
  EXPECT_TRUE(log.take().empty());
}

TEST_F(TableLogTest, WhereTheDriverFailsNothingIsRead) {
  if (!device.is_simulated()) GTEST_SKIP() << "needs failure injection";
  for (const char* symbol : {"cuGraphGetNodes", "cuGraphMemcpyNodeGetParams"}) {
    const std::vector<uint32_t> found = positions([&](bindings::TableLog& log) {
      log.enter("aten::_foreach_norm");
      copy();
      device.simulator().fail(symbol, 1, abi::kOutOfMemory);
      log.leave("aten::_foreach_norm");
    });
    EXPECT_TRUE(found.empty()) << symbol;
  }
}

TEST_F(TableLogTest, AnOperatorWhoseBeginningIsNotKnownHasNoTables) {
  if (!device.is_simulated()) GTEST_SKIP() << "needs failure injection";
  const std::vector<uint32_t> found = positions([&](bindings::TableLog& log) {
    log.enter("aten::_foreach_norm");
    copy();
    log.leave("aten::_foreach_norm");
    copy();  // another operator's
    device.simulator().fail("cuGraphGetNodes", 1, abi::kOutOfMemory);
    log.enter("aten::_foreach_norm");
    copy();
    log.leave("aten::_foreach_norm");
    log.enter("aten::_foreach_norm");
    copy();
    log.leave("aten::_foreach_norm");
  });
  EXPECT_EQ(found, (std::vector<uint32_t>{0, 3}));
}

TEST_F(TableLogTest, EachDeviceHasMemoryOfItsOwn) {
  TableMemory& first = bindings::table_memory(driver, 100);
  EXPECT_EQ(&bindings::table_memory(driver, 100), &first);
  EXPECT_NE(&bindings::table_memory(driver, 101), &first);
}

}  // namespace
}  // namespace pygraph::testing
