// Held blocks on an allocator that takes the place of PyTorch's for GPUs.

#include "replay/held_blocks.h"

#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <thread>
#include <vector>

#include "test_allocator.h"

namespace pygraph::bindings {
namespace {

using HeldBlocksTest = WorkspaceTest;

const c10::Device kDevice(c10::kCUDA, 0);
const c10::Device kOtherDevice(c10::kCUDA, 1);
const CallStream kStream{reinterpret_cast<CUstream>(0x10), true};
const CallStream kOtherStream{reinterpret_cast<CUstream>(0x20), true};

// Another thread may be in a launch when the process forks, and the lock is its.
TEST_F(HeldBlocksTest, AForkedChildDropsGraphs) {
  const Workspace::Share share = reserved(*workspace, 4, 304);
  auto blocks = std::make_unique<HeldBlocks>(kDevice);
  blocks->begin(kStream, 100, 150, 1000);
  const pid_t child = [&] {
    const Workspace::Access launch = workspace->acquire(304 * kMiB);
    const pid_t forked = fork();
    if (forked == 0) {
      alarm(10);  // ends the child
      workspace->release(share);
      blocks.reset();
      allocator.reserved = 1001;
      HeldBlocks::look();
      _exit(0);
    }
    return forked;
  }();
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(blocks->are_held());
  workspace->release(share);
}

TEST_F(HeldBlocksTest, StreamsTogetherHoldSoMuchAtMost) {
  HeldBlocks first(kDevice), second(kDevice), elsewhere(kDevice), of_other_device(kOtherDevice);
  first.begin(kStream, 100, 150, 1000);
  EXPECT_TRUE(first.are_held() && first.are_held(kStream));
  second.begin(kStream, 140, 150, 1000);  // the stream's graphs share
  EXPECT_TRUE(second.are_held());
  elsewhere.begin(kOtherStream, 11, 150, 1000);
  EXPECT_FALSE(elsewhere.are_held());
  elsewhere.begin(kOtherStream, 10, 150, 1000);
  EXPECT_TRUE(elsewhere.are_held());
  of_other_device.begin(kStream, 150, 150, 1000);
  EXPECT_TRUE(of_other_device.are_held());
  first.begin(kStream, 100, 150, 1000);  // selected again
  EXPECT_TRUE(first.are_held());
}

TEST_F(HeldBlocksTest, ASelectionThatIsNotAllowedEndsTheOneBefore) {
  HeldBlocks blocks(kDevice);
  blocks.begin(kStream, 100, 150, 1000);
  blocks.begin(kStream, 200, 150, 1000);
  EXPECT_FALSE(blocks.are_held());
}

TEST_F(HeldBlocksTest, ALaunchOnAnotherStreamEndsIt) {
  HeldBlocks blocks(kDevice), other(kDevice);
  blocks.begin(kStream, 100, 150, 1000);
  EXPECT_FALSE(blocks.are_held(kOtherStream));
  EXPECT_FALSE(blocks.are_held(kStream));
  other.begin(kOtherStream, 150, 150, 1000);
  EXPECT_TRUE(other.are_held());
}

TEST_F(HeldBlocksTest, AreDroppedOnceMemoryIsShort) {
  HeldBlocks looks(kDevice), idle(kDevice), of_other_device(kOtherDevice);
  looks.begin(kStream, 100, 150, 1000);
  idle.begin(kStream, 100, 150, 5000);
  of_other_device.begin(kStream, 100, 150, 5000);
  const Workspace::Share share = reserved(*workspace, 4, 304);
  acquire(*workspace, 304);
  allocator.reserved = 1000;
  HeldBlocks::look();
  EXPECT_TRUE(looks.are_held());
  allocator.reserved = 1001;
  for (int i = 0; i < 16; ++i) looks.note_launch();
  EXPECT_FALSE(looks.are_held() || idle.are_held());
  EXPECT_TRUE(of_other_device.are_held());
  EXPECT_EQ(live_mib(), 0);
  workspace->release(share);
}

TEST_F(HeldBlocksTest, ALookIsOfAllDevices) {
  HeldBlocks first(kDevice), second(kDevice), of_other_device(kOtherDevice);
  first.begin(kStream, 100, 150, 2000);
  second.begin(kStream, 100, 150, 1000);
  of_other_device.begin(kStream, 100, 150, 1500);
  allocator.reserved = 1001;
  HeldBlocks::look();
  EXPECT_FALSE(first.are_held() || second.are_held());
  EXPECT_TRUE(of_other_device.are_held());
  allocator.reserved = 1501;
  HeldBlocks::look();
  EXPECT_FALSE(of_other_device.are_held());
}

TEST_F(HeldBlocksTest, Threads) {
  allocator.reserved = 2000;
  const auto run = [this](int i) {
    const c10::Device device = i % 2 == 0 ? kDevice : kOtherDevice;
    for (int k = 0; k < 1000; ++k) {
      HeldBlocks blocks(device);
      const auto own = Workspace::of_stream(device.index(), i / 2);
      blocks.begin(i % 3 == 0 ? kStream : kOtherStream, 10, 1000, 1500 + k);
      const Workspace::Share share = reserved(*own, 1, 3);
      acquire(*own, 3);
      blocks.note_launch();
      if (k % 7 == 0) HeldBlocks::look();
      if (k % 50 == 0) HeldBlocks::drop_all(kDevice);
      own->release(share);
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 6; ++i) threads.emplace_back(run, i);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace pygraph::bindings
