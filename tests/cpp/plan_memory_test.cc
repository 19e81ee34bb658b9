// Invariants of the workspace layout, on graphs made by hand; nothing here needs a device.
#include <gtest/gtest.h>

#include <random>

#include "pygraph/link.h"

namespace pygraph {
namespace {

LinkedGraph chain(uint32_t nodes) {
  LinkedGraph linked;
  linked.recording.nodes.resize(nodes);
  for (uint32_t n = 0; n + 1 < nodes; ++n) linked.recording.edges.push_back({n, n + 1, {}});
  return linked;
}

void add_internal(LinkedGraph& linked, uint64_t size, uint32_t first, uint32_t last,
                  uint64_t address = 0) {
  Symbol symbol{SymbolKind::kInternal, 0, size, first, last};
  symbol.address_b = address;
  linked.symbols.push_back(symbol);
}

bool overlap(const Symbol& a, const Symbol& b) {
  return a.workspace_offset < b.workspace_offset + b.size &&
         b.workspace_offset < a.workspace_offset + a.size;
}

TEST(PlanMemory, MemoryThatLivesTogetherNeverOverlaps) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    LinkedGraph linked = chain(40);
    for (int i = 0; i < 30; ++i) {
      const uint32_t first = random() % 40;
      add_internal(linked, 1 + random() % 5000, first, first + 1 + random() % 10);
    }
    plan_memory(linked);
    for (size_t i = 0; i < linked.symbols.size(); ++i) {
      const Symbol& a = linked.symbols[i];
      EXPECT_EQ(a.workspace_offset % 512, 0);
      EXPECT_LE(a.workspace_offset + a.size, linked.workspace_size);
      for (size_t j = 0; j < i; ++j) {
        const Symbol& b = linked.symbols[j];
        const bool together = a.first < b.last && b.first < a.last;
        EXPECT_FALSE(together && overlap(a, b));
      }
    }
  }
}

TEST(PlanMemory, MemoryUsedOneAfterTheOtherIsShared) {
  LinkedGraph linked = chain(10);
  for (uint32_t n = 0; n < 10; ++n) add_internal(linked, 4096, n, n + 1);
  plan_memory(linked);
  EXPECT_EQ(linked.workspace_size, 4096);
}

TEST(PlanMemory, ABranchKeepsTheRecordedLayout) {
  LinkedGraph linked = chain(3);
  linked.recording.edges = {{0, 1, {}}, {0, 2, {}}};
  add_internal(linked, 4096, 0, 1, 0x10000);
  add_internal(linked, 4096, 1, 2, 0x20000);  // could share by order of creation, but must not
  add_internal(linked, 4096, 2, 3, 0x10000);  // was shared while recording
  plan_memory(linked);
  EXPECT_EQ(linked.workspace_size, 8192);
  EXPECT_FALSE(overlap(linked.symbols[0], linked.symbols[1]));
  EXPECT_EQ(linked.symbols[0].workspace_offset, linked.symbols[2].workspace_offset);
}

TEST(PlanMemory, AProgrammaticEdgeKeepsTheRecordedLayout) {
  LinkedGraph linked = chain(2);
  linked.recording.edges[0].data.type = 1;
  add_internal(linked, 4096, 0, 1, 0x10000);
  add_internal(linked, 4096, 1, 2, 0x20000);
  plan_memory(linked);
  EXPECT_EQ(linked.workspace_size, 8192);
}

TEST(PlanMemory, AGraphWithoutInternalMemoryNeedsNone) {
  LinkedGraph linked = chain(3);
  plan_memory(linked);
  EXPECT_EQ(linked.workspace_size, 0);
}

}  // namespace
}  // namespace pygraph
