#include "record/allocation_log.h"

#include <c10/core/Allocator.h>

#include <thread>

#include "record/memory_reports.h"
#include "record/node_count.h"

namespace pygraph::bindings {
namespace {

thread_local AddressSpace* t_space = nullptr;

class Observer : public MemoryReports {
 public:
  Observer(const Driver& driver, CUstream stream, Range range, std::shared_ptr<AllocationLog> log,
           std::shared_ptr<std::vector<uint64_t>> allocated_here)
      : driver_(driver),
        stream_(stream),
        range_(range),
        log_(std::move(log)),
        allocated_here_(std::move(allocated_here)) {}

  // Called under the allocator's lock: must not allocate from it, throw, or take Python's lock.
  void reportMemoryUsage(void* pointer, int64_t size, size_t /*total_allocated*/,
                         size_t /*total_reserved*/, c10::Device /*device*/) override {
    const auto address = reinterpret_cast<uint64_t>(pointer);
    if (!range_.contains(address)) return;
    if (size > 0) {
      log_->allocate(address, static_cast<uint64_t>(size), nodes());
      if (std::this_thread::get_id() == thread_) {
        allocated_here_->push_back(address);
      } else {
        std::erase(*allocated_here_, address);  // where it was freed before
      }
    } else {
      log_->free(address, nodes());
    }
  }

 private:
  // Outside the capture the number of nodes does not change.
  uint32_t nodes() { return node_count_ = count_nodes(driver_, stream_, node_count_); }

  const Driver& driver_;
  CUstream stream_;
  Range range_;
  std::shared_ptr<AllocationLog> log_;
  std::shared_ptr<std::vector<uint64_t>> allocated_here_;
  std::thread::id thread_ = std::this_thread::get_id();
  uint32_t node_count_ = 0;
};

}  // namespace

AllocationScope::AllocationScope(const Driver& driver, CUstream stream, AddressSpace& space)
    : log_(std::make_shared<AllocationLog>()),
      allocated_here_(std::make_shared<std::vector<uint64_t>>()),
      guard_(c10::DebugInfoKind::PROFILER_STATE,
             std::make_shared<Observer>(driver, stream, space.range(), log_, allocated_here_)) {
  t_space = &space;
}

AllocationScope::~AllocationScope() {
  t_space = nullptr;
}

}  // namespace pygraph::bindings

// PyTorch turns null into its OutOfMemoryError.
void* pygraph_record_allocate(int64_t size, int /*device*/, CUstream /*stream*/) {
  using Content = pygraph::AddressSpace::Content;
  if (pygraph::bindings::t_space == nullptr) return nullptr;
  try {
    return reinterpret_cast<void*>(
        pygraph::bindings::t_space->allocate(static_cast<uint64_t>(size), 0, Content::kOther));
  } catch (const pygraph::DriverError&) {
    return nullptr;
  }
}

void pygraph_record_free(void* /*address*/, int64_t /*size*/, int /*device*/, CUstream /*stream*/) {
  // The AddressSpace releases all its addresses at once.
}
