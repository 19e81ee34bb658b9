// The tables that trusted operators copy from the host: those that depend on sizes alone
// (host_tables.h).
#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "pygraph/host_tables.h"

namespace pygraph::bindings {

// Of one recording. To be told of every operator of PyTorch's, in the thread that captures.
class TableLog {
 public:
  TableLog(const Driver& driver, CUstream stream) : driver_(driver), stream_(stream) {}

  // `name` is as PyTorch reports it, also of what is no operator. `is_own`: whether a listed
  // operator's kernels are PyTorch's own.
  void enter(std::string_view name, bool is_own = true);
  // When the operator has ended, and nothing else has begun.
  void leave(std::string_view name) noexcept;
  std::vector<HostTable> take() { return std::move(tables_); }

  // Whether an operator's copies may be tables.
  static bool is_listed(std::string_view name);

 private:
  const Driver& driver_;
  CUstream stream_;
  int depth_ = 0;           // of these operators inside each other
  uint32_t first_ = 0;      // the number of nodes when the outermost one began
  bool is_trusted_ = true;  // whether nothing but PyTorch's own operators has run in it
  std::vector<HostTable> tables_;
};

// The tables' memory on the current device.
TableMemory& table_memory(const Driver& driver, int device);

}  // namespace pygraph::bindings
