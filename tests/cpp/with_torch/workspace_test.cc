// Workspaces on an allocator that takes the place of PyTorch's for GPUs.

#include "replay/workspace.h"

#include <stdexcept>
#include <utility>
#include <vector>

#include "test_allocator.h"

namespace pygraph::bindings {
namespace {

TEST_F(WorkspaceTest, IsAsLargeAsTheLargestShare) {
  const Workspace::Share small = reserved(*workspace, 10);
  const Workspace::Share large = reserved(*workspace, 4, 304);
  acquire(*workspace, 10);
  acquire(*workspace, 304);
  EXPECT_EQ(live_mib(), 304);
  workspace->release(small);
  EXPECT_EQ(live_mib(), 304);
  workspace->release(large);
  EXPECT_EQ(live_mib(), 0);
}

TEST_F(WorkspaceTest, FreesBlocksOfOneDevice) {
  const Workspace::Share share = reserved(*workspace, 4, 304);
  const auto other_stream = Workspace::of_stream(0, 2);
  const Workspace::Share without = reserved(*other_stream, 50);
  acquire(*workspace, 304);
  acquire(*other_stream, 50);
  Workspace::free_blocks(1);
  EXPECT_EQ(live_mib(), 354);
  Workspace::free_blocks(0);
  EXPECT_EQ(live_mib(), 50);
  acquire(*workspace, 4);
  workspace->release(share);
  other_stream->release(without);
}

TEST_F(WorkspaceTest, ALaunchUnderWayLeavesNothing) {
  const Workspace::Share share = reserved(*workspace, 4, 304);
  Workspace::free_blocks(0);
  acquire(*workspace, 304);
  workspace->release({.with_blocks = share.with_blocks, .generation = share.generation});
  EXPECT_EQ(live_mib(), 0);
  workspace->release(share);
}

TEST_F(WorkspaceTest, AnOldShareTakesNothingFromANewOne) {
  const Workspace::Share old = reserved(*workspace, 4, 304);
  Workspace::free_blocks(0);
  const Workspace::Share share = reserved(*workspace, 4, 304);
  EXPECT_NE(share.generation, old.generation);
  acquire(*workspace, 304);
  workspace->release(old);
  EXPECT_EQ(live_mib(), 304);
  workspace->release(share);
}

TEST_F(WorkspaceTest, GrowthThatFailsKeepsWhatWasThere) {
  const Workspace::Share share = reserved(*workspace, 200);
  acquire(*workspace, 8);
  allocator.limit = 100 * kMiB;
  EXPECT_THROW(acquire(*workspace, 200), c10::OutOfMemoryError);
  EXPECT_EQ(live_mib(), 8);
  workspace->release(share);
}

TEST_F(WorkspaceTest, BlocksHaveASegmentOfTheirOwn) {
  const Workspace::Share share = reserved(*workspace, 4, 304);
  allocator.sharing = 2;
  const uint64_t address = acquire(*workspace, 304);
  EXPECT_EQ(allocator.segment_of(reinterpret_cast<void*>(address)), 304 * kMiB);
  EXPECT_EQ(live_mib(), 304);
  workspace->release(share);
}

TEST_F(WorkspaceTest, TheCacheIsEmptiedForBlocks) {
  const Workspace::Share share = reserved(*workspace, 4, 304);
  allocator.sharing = 1000;
  allocator.is_cache_shared = true;
  const uint64_t address = acquire(*workspace, 304);
  EXPECT_EQ(allocator.segment_of(reinterpret_cast<void*>(address)), 304 * kMiB);
  EXPECT_EQ(live_mib(), 304);
  workspace->release(share);
}

TEST_F(WorkspaceTest, LargeBlocksAreSearchedFor) {
  const Workspace::Share share = reserved(*workspace, 4, 3000);
  allocator.sharing = 4;
  const uint64_t address = acquire(*workspace, 3000);
  EXPECT_EQ(allocator.segment_of(reinterpret_cast<void*>(address)), 3000 * kMiB);
  workspace->release(share);
}

TEST_F(WorkspaceTest, GrowthThatFailsFreesBlocks) {
  const Workspace::Share share = reserved(*workspace, 8, 304);
  const Workspace::Share larger = reserved(*workspace, 400);
  acquire(*workspace, 304);
  allocator.limit = 350 * kMiB;
  EXPECT_THROW(acquire(*workspace, 400), c10::OutOfMemoryError);
  EXPECT_EQ(live_mib(), 0);  // they would have to be placed again
  acquire(*workspace, 304);
  EXPECT_EQ(live_mib(), 304);
  workspace->release(share);
  workspace->release(larger);
}

TEST_F(WorkspaceTest, BlocksDoNotStayInTheSegmentOfOthers) {
  const Workspace::Share share = reserved(*workspace, 8, 304);
  acquire(*workspace, 8);
  allocator.sharing = 1000;
  EXPECT_THROW(acquire(*workspace, 304), c10::OutOfMemoryError);
  EXPECT_EQ(live_mib(), 0);
  Workspace::free_blocks(0);
  const Workspace::Share without = reserved(*workspace, 200);
  acquire(*workspace, 200);  // without blocks, it may
  EXPECT_EQ(live_mib(), 200);
  workspace->defragment();
  EXPECT_EQ(live_mib(), 200);
  workspace->release(share);
  workspace->release(without);
}

TEST_F(WorkspaceTest, AGraphMayEndWhileMemoryIsAllocatedOrFreed) {
  const Workspace::Share share = reserved(*workspace, 4, 304);
  std::vector<Workspace::Share> ending = {reserved(*workspace, 5), reserved(*workspace, 6, 400)};
  const auto end_one = [&] {
    if (ending.empty()) return;
    const Workspace::Share ended = ending.back();
    ending.pop_back();
    workspace->release(ended);
  };
  allocator.on_allocate = end_one;
  acquire(*workspace, 304);
  EXPECT_EQ(ending.size(), 1);
  allocator.on_free = end_one;
  Workspace::free_blocks(0);
  EXPECT_TRUE(ending.empty());
  workspace->release(share);
}

TEST_F(WorkspaceTest, WhatEndsWhileItMovesIsFreed) {
  const Workspace::Share small = reserved(*workspace, 4);
  for (const bool all_end : {false, true}) {
    Workspace::Share large = reserved(*workspace, 400);
    allocator.sharing = 1;
    acquire(*workspace, 400);
    if (all_end) workspace->release(small);
    allocator.on_free = [&] { workspace->release(std::exchange(large, {})); };
    workspace->defragment();
    allocator.on_free = nullptr;
    EXPECT_EQ(live_mib(), 0);
  }
}

TEST_F(WorkspaceTest, GrowthThatFailsKeepsNothingThatHasEnded) {
  const Workspace::Share share = reserved(*workspace, 200);
  Workspace::Share ends = reserved(*workspace, 50);
  acquire(*workspace, 50);
  allocator.limit = 100 * kMiB;
  allocator.on_allocate = [&] { workspace->release(std::exchange(ends, {})); };
  EXPECT_THROW(acquire(*workspace, 200), c10::OutOfMemoryError);
  EXPECT_LE(live_mib(), 50);
  allocator.on_allocate = nullptr;
  workspace->release(share);
  EXPECT_EQ(live_mib(), 0);
}

TEST_F(WorkspaceTest, BlocksMayBeDroppedWhileItGrows) {
  const Workspace::Share share = reserved(*workspace, 4, 304);
  allocator.on_allocate = [&] { Workspace::free_blocks(0); };
  EXPECT_NE(acquire(*workspace, 304), 0);
  workspace->release({.with_blocks = share.with_blocks, .generation = share.generation});
  EXPECT_EQ(live_mib(), 0);
  workspace->release(share);
}

TEST_F(WorkspaceTest, GrowsBesideTheCaptureOfAnotherThread) {
  const Workspace::Share share = reserved(*workspace, 4, 304);
  const auto expect_relaxed = [] { EXPECT_EQ(Allocator::capture_mode, abi::kCaptureModeRelaxed); };
  allocator.on_allocate = expect_relaxed;
  allocator.sharing = 5;
  acquire(*workspace, 304);
  EXPECT_EQ(Allocator::capture_mode, abi::kCaptureModeGlobal);
  Workspace::free_blocks(0);
  allocator.sharing = 5;
  acquire(*workspace, 4);
  workspace->defragment();
  EXPECT_EQ(Allocator::capture_mode, abi::kCaptureModeGlobal);
  workspace->release(share);
}

TEST_F(WorkspaceTest, AnObserverThatRaisesMeansThatThereIsNoMemory) {
  const Workspace::Share share = reserved(*workspace, 200);
  acquire(*workspace, 8);
  allocator.on_allocate = [&] {
    if (allocator.limit == 0) throw std::runtime_error("of the observer");
  };
  allocator.limit = 0;
  EXPECT_THROW(acquire(*workspace, 200), c10::OutOfMemoryError);
  allocator.limit = INT64_MAX;
  acquire(*workspace, 200);
  workspace->release(share);
}

}  // namespace
}  // namespace pygraph::bindings
