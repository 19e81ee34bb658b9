// The allocations of PyTorch's allocator on this thread during a recording.
//
// Two hooks, both thread-local in effect: the allocator reports every block that it hands out or
// takes back (c10::MemoryReportingInfoBase, the profiler's interface), and a memory pool whose
// segments come from an AddressSpace, not from cudaMalloc (torch.cuda.MemPool with a pluggable
// allocator; see pygraph_record_allocate below).
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "pygraph/address_space.h"

namespace pygraph::bindings {

// Active from construction to destruction, on the constructing thread. The profiler uses the same
// thread-local place: do not construct one while a profiler is active.
class AllocationScope {
 public:
  // `stream` is the one that captures; its node count dates the events.
  AllocationScope(const Driver& driver, CUstream stream, AddressSpace& space);
  ~AllocationScope();
  AllocationScope(const AllocationScope&) = delete;
  AllocationScope& operator=(const AllocationScope&) = delete;

  const AllocationLog& log() const { return *log_; }
  // Addresses that the constructing thread itself has allocated. (PyTorch hands the report on to
  // threads that work for this one: autograd's.)
  const std::vector<uint64_t>& allocated_here() const { return *allocated_here_; }

 private:
  std::shared_ptr<AllocationLog> log_;
  std::shared_ptr<std::vector<uint64_t>> allocated_here_;
  c10::DebugInfoGuard guard_;
};

}  // namespace pygraph::bindings

// The allocator of pools, called by PyTorch by name. Gives addresses of the current thread's
// AllocationScope; null (out of memory) where there is none.
extern "C" {
__attribute__((visibility("default"))) void* pygraph_record_allocate(int64_t size, int device,
                                                                     CUstream stream);
__attribute__((visibility("default"))) void pygraph_record_free(void* address, int64_t size,
                                                                int device, CUstream stream);
}
