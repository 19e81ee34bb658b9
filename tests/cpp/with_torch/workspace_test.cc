// Workspaces and held blocks on an allocator that takes the place of PyTorch's for GPUs.

#include "replay/workspace.h"

#include <Python.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "replay/held_blocks.h"

// The code under test releases Python's lock if its thread has it.
extern "C" {
PyThreadState* PyGILState_GetThisThreadState() {
  return nullptr;
}
PyThreadState* _PyThreadState_UncheckedGet() {
  return nullptr;
}
PyThreadState* PyEval_SaveThread() {
  return nullptr;
}
void PyEval_RestoreThread(PyThreadState* /*state*/) {}
}

namespace {

constexpr int64_t kMiB = 1 << 20;

// Counts bytes. Each piece has a segment of its own, but for the next ones that are said to share.
class Allocator : public c10::DeviceAllocator {
 public:
  std::atomic<int64_t> live = 0;  // bytes
  std::atomic<int64_t> limit = INT64_MAX;
  std::atomic<int64_t> reserved = 0;  // what it tells
  std::function<void()> on_allocate;  // observers that the program has added
  std::function<void()> on_free;
  static thread_local int capture_mode;
  std::atomic<int> sharing = 0;  // pieces to come that lie in larger segments
  std::atomic<bool> is_cache_shared =
      false;  // those segments are the cache's, which may be emptied

  static Allocator& instance() {
    static auto* allocator = new Allocator;
    return *allocator;
  }
  size_t segment_of(void* memory) {
    const std::lock_guard lock(mutex_);
    return pieces_[memory].segment;
  }

  c10::DataPtr allocate(size_t bytes) override {
    const auto size = static_cast<int64_t>(bytes);
    if (on_allocate) on_allocate();
    if (live + size > limit) throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "none");
    void* memory = std::malloc(1);
    live += size;
    const std::lock_guard lock(mutex_);
    pieces_[memory] = {size, sharing-- > 0 ? bytes + (64 << 20) : bytes};
    return {memory, memory, &free, c10::Device(c10::kCUDA, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* /*to*/, const void* /*from*/, size_t /*bytes*/) const override {}
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {
    if (is_cache_shared) sharing = 0;
  }
  void recordStream(const c10::DataPtr& /*memory*/, c10::Stream /*stream*/) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex /*device*/) override {
    c10::CachingDeviceAllocator::DeviceStats statistics;
    statistics.reserved_bytes[0].current = reserved;
    return statistics;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}
  void resetPeakStats(c10::DeviceIndex /*device*/) override {}
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex /*device*/) override { return {0, 0}; }

 private:
  struct Piece {
    int64_t bytes = 0;
    size_t segment = 0;
  };
  static void free(void* memory) {
    Allocator& self = instance();
    if (self.on_free) self.on_free();
    const std::lock_guard lock(self.mutex_);
    self.live -= self.pieces_[memory].bytes;
    self.pieces_.erase(memory);
    std::free(memory);
  }
  std::mutex mutex_;
  std::map<void*, Piece> pieces_;
};

thread_local int Allocator::capture_mode = pygraph::abi::kCaptureModeGlobal;

}  // namespace

namespace pygraph {

const Driver& cuda_driver() {
  static const Driver driver = [] {
    Driver made;
    made.memory_get_address_range = [](abi::DevicePointer* base, size_t* size,
                                       abi::DevicePointer address) -> abi::Result {
      *base = address;
      *size = Allocator::instance().segment_of(reinterpret_cast<void*>(address));
      return abi::kSuccess;
    };
    made.thread_exchange_capture_mode = [](int* mode) -> abi::Result {
      std::swap(*mode, Allocator::capture_mode);
      return abi::kSuccess;
    };
    return made;
  }();
  return driver;
}

namespace bindings {
namespace {

const c10::Device kDevice(c10::kCUDA, 0);
const c10::Device kOtherDevice(c10::kCUDA, 1);
const CallStream kStream{reinterpret_cast<CUstream>(0x10), true};
const CallStream kOtherStream{reinterpret_cast<CUstream>(0x20), true};

class WorkspaceTest : public testing::Test {
 public:
  static void SetUpTestSuite() {
    static const c10::impl::FakeGuardImpl<c10::kCUDA> guard;
    static const c10::impl::DeviceGuardImplRegistrar registrar(c10::kCUDA, &guard);
    c10::SetAllocator(c10::kCUDA, &Allocator::instance(), /*priority=*/10);
  }
  void SetUp() override {
    allocator.limit = INT64_MAX;
    allocator.reserved = 0;
    allocator.sharing = 0;
    allocator.is_cache_shared = false;
  }
  void TearDown() override {
    allocator.on_allocate = allocator.on_free = nullptr;
    EXPECT_EQ(allocator.live, 0);
  }

  static uint64_t acquire(Workspace& workspace, int64_t mib) {
    return workspace.acquire(mib * kMiB).address;
  }
  int64_t live_mib() const { return allocator.live / kMiB; }
  // A share with so many MiB in all that was reserved.
  static Workspace::Share reserved(Workspace& workspace, uint64_t mib, uint64_t with_blocks = 0) {
    Workspace::Share share{.bytes = mib * kMiB, .with_blocks = with_blocks * kMiB};
    workspace.reserve(share);
    return share;
  }

  Allocator& allocator = Allocator::instance();
  std::shared_ptr<Workspace> workspace = Workspace::of_stream(0, 1);
};

using HeldBlocksTest = WorkspaceTest;

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
  acquire(*workspace, 200);  // without blocks, it may
  EXPECT_EQ(live_mib(), 200);
  workspace->defragment();
  EXPECT_EQ(live_mib(), 200);
  workspace->release(share);
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
}  // namespace bindings
}  // namespace pygraph
