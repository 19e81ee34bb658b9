// An allocator that takes the place of PyTorch's for GPUs, and a fixture for tests on it.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "replay/workspace.h"

namespace pygraph::bindings {

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
      false;  // their segments are the cache's, which may be emptied

  static Allocator& instance();
  size_t segment_of(void* memory);

  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* /*to*/, const void* /*from*/, size_t /*bytes*/) const override {}
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {
    if (is_cache_shared) sharing = 0;
  }
  void recordStream(const c10::DataPtr& /*memory*/, c10::Stream /*stream*/) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}
  void resetPeakStats(c10::DeviceIndex /*device*/) override {}
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex /*device*/) override { return {0, 0}; }

 private:
  struct Piece {
    int64_t bytes = 0;
    size_t segment = 0;
  };
  static void free(void* memory);
  std::mutex mutex_;
  std::map<void*, Piece> pieces_;
};

class WorkspaceTest : public testing::Test {
 public:
  static void SetUpTestSuite();
  void SetUp() override;
  void TearDown() override;

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

}  // namespace pygraph::bindings
