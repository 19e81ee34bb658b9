#include "test_allocator.h"

#include <Python.h>
#include <c10/core/impl/FakeGuardImpl.h>

#include <cstdlib>

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

namespace pygraph {

const Driver& cuda_driver() {
  static const Driver driver = [] {
    Driver made;
    made.memory_get_address_range = [](abi::DevicePointer* base, size_t* size,
                                       abi::DevicePointer address) -> abi::Result {
      *base = address;
      *size = bindings::Allocator::instance().segment_of(reinterpret_cast<void*>(address));
      return abi::kSuccess;
    };
    made.thread_exchange_capture_mode = [](int* mode) -> abi::Result {
      std::swap(*mode, bindings::Allocator::capture_mode);
      return abi::kSuccess;
    };
    return made;
  }();
  return driver;
}

namespace bindings {

thread_local int Allocator::capture_mode = pygraph::abi::kCaptureModeGlobal;

Allocator& Allocator::instance() {
  static auto* allocator = new Allocator;
  return *allocator;
}

size_t Allocator::segment_of(void* memory) {
  const std::lock_guard lock(mutex_);
  return pieces_[memory].segment;
}

c10::DataPtr Allocator::allocate(size_t bytes) {
  const auto size = static_cast<int64_t>(bytes);
  if (on_allocate) on_allocate();
  if (live + size > limit) throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "none");
  void* memory = std::malloc(1);
  live += size;
  const std::lock_guard lock(mutex_);
  pieces_[memory] = {size, sharing-- > 0 ? bytes + (64 << 20) : bytes};
  return {memory, memory, &free, c10::Device(c10::kCUDA, 0)};
}

c10::CachingDeviceAllocator::DeviceStats Allocator::getDeviceStats(c10::DeviceIndex /*device*/) {
  c10::CachingDeviceAllocator::DeviceStats statistics;
  statistics.reserved_bytes[0].current = reserved;
  return statistics;
}

void Allocator::free(void* memory) {
  Allocator& self = instance();
  if (self.on_free) self.on_free();
  const std::lock_guard lock(self.mutex_);
  self.live -= self.pieces_[memory].bytes;
  self.pieces_.erase(memory);
  std::free(memory);
}

void WorkspaceTest::SetUpTestSuite() {
  static const c10::impl::FakeGuardImpl<c10::kCUDA> guard;
  static const c10::impl::DeviceGuardImplRegistrar registrar(c10::kCUDA, &guard);
  c10::SetAllocator(c10::kCUDA, &Allocator::instance(), /*priority=*/10);
}

void WorkspaceTest::SetUp() {
  allocator.limit = INT64_MAX;
  allocator.reserved = 0;
  allocator.sharing = 0;
  allocator.is_cache_shared = false;
}

void WorkspaceTest::TearDown() {
  allocator.on_allocate = allocator.on_free = nullptr;
  EXPECT_EQ(allocator.live, 0);
}

}  // namespace bindings
}  // namespace pygraph
