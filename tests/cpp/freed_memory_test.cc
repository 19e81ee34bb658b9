// Memory that is freed between two launches, of which the second one still uses it.
#include "planned_graphs.h"
#include "test_device.h"

namespace pygraph::testing {
namespace {

class FreedBeforeLaunchTest : public DeviceTest {};

// A kernel may be launched with the address of memory that has been freed since the launch before
// it, which stream order makes safe: Match::kJustFreed makes a relocation of that.
TEST_F(FreedBeforeLaunchTest, TheLaunchMayUseTheMemory) {
  constexpr unsigned kCount = 256;
  constexpr uint64_t kBytes = kCount * sizeof(float);
  for (const bool is_forked : {false, true}) {
    SCOPED_TRACE(is_forked);
    const Stream side = create_stream(driver);
    const Event event = create_event(driver);
    const auto wait = [&](CUstream waiting, CUstream awaited) {
      PYGRAPH_CHECK(driver, event_record(event.get(), awaited));
      PYGRAPH_CHECK(driver, stream_wait_event(waiting, event.get(), 0));
    };
    TwoRecordings recordings =
        record_twice(device, std::vector<uint64_t>(2, kBytes), [&](Session& s) {
          const uint64_t x = s.pool.allocate(kBytes);
          device.add_constant(s.stream, x, s.inputs[0], kCount, 1);
          if (is_forked) {
            wait(side.get(), s.stream);
            const uint64_t other = s.pool.allocate(kBytes);
            device.add_constant(side.get(), other, s.inputs[1], kCount, 1);
          }
          const uint64_t y = s.pool.allocate(kBytes);
          s.pool.free(x);
          device.add(s.stream, y, x, s.inputs[1], kCount);
          if (is_forked) wait(s.stream, side.get());
          const uint64_t result = s.pool.allocate(kBytes);
          device.add_constant(s.stream, result, y, kCount, 1);
          return std::vector{result};
        });
    const LinkedGraph linked = recordings.link(driver);
    std::vector<Symbol> used;  // by the kernel that adds
    for (const Relocation& relocation : linked.relocations) {
      const Symbol& symbol = linked.symbols[relocation.symbol];
      const bool is_sum = relocation.node == (is_forked ? 2 : 1);
      if (is_sum && symbol.kind == SymbolKind::kInternal) used.push_back(symbol);
    }
    ASSERT_EQ(used.size(), 2);
    EXPECT_FALSE(used[0].region == used[1].region && overlap(used[0], used[1]));
  }
}

// The same, with the plan's other way to share: a block in an output.
TEST_F(FreedBeforeLaunchTest, TheMemoryIsNotInTheLaunchsOutput) {
  constexpr uint64_t kBytes = 4 << 20;
  constexpr unsigned kCount = 1024;
  for (const bool is_forked : {false, true}) {
    SCOPED_TRACE(is_forked);
    const Stream side = create_stream(driver);
    const Event event = create_event(driver);
    const auto wait = [&](CUstream waiting, CUstream awaited) {
      PYGRAPH_CHECK(driver, event_record(event.get(), awaited));
      PYGRAPH_CHECK(driver, stream_wait_event(waiting, event.get(), 0));
    };
    TwoRecordings recordings =
        record_twice(device, std::vector<uint64_t>(2, kBytes), [&](Session& s) {
          const uint64_t x = s.pool.allocate(kBytes);
          const uint64_t other = s.pool.allocate(kBytes);
          if (is_forked) wait(side.get(), s.stream);
          device.add_constant(is_forked ? side.get() : s.stream, other, s.inputs[1], kCount, 1);
          device.add_constant(s.stream, x, s.inputs[0], kCount, 1);
          if (is_forked) wait(s.stream, side.get());
          const uint64_t result = s.pool.allocate(kBytes);
          s.pool.free(x);
          device.add(s.stream, result, x, other, kCount);
          return std::vector{result};
        });
    const LinkedGraph linked = recordings.link(driver, {.smallest_block = kBytes});
    for (const Relocation& relocation : linked.relocations) {
      const Symbol& symbol = linked.symbols[relocation.symbol];
      if (relocation.node != 2 || symbol.region == 0) continue;
      EXPECT_EQ(linked.regions[symbol.region - 1].output, Region::kNoOutput);
    }
  }
}

}  // namespace
}  // namespace pygraph::testing
