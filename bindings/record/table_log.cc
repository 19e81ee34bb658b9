#include "record/table_log.h"

#include <algorithm>
#include <array>
#include <exception>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>

#include "record/node_count.h"

namespace pygraph::bindings {
namespace {

// PyTorch 2.15 computes for each of them where the parts of each tensor begin, from the tensors'
// sizes (compute_foreach_reduction_chunks in ForeachReduceOp.cu), in pinned memory. An operator
// belongs here only if its tables have no addresses and no values of tensors in them: those of
// _chunk_cat and split_with_sizes_copy, for example, are addresses.
constexpr std::array<std::string_view, 3> kListed = {"aten::_foreach_norm", "aten::_foreach_max",
                                                     "aten::_foreach_powsum"};

// In place of a count that the driver has not given: behind all nodes, so no copy is a table.
constexpr uint32_t kUnknown = std::numeric_limits<uint32_t>::max();

}  // namespace

bool TableLog::is_listed(std::string_view name) {
  return std::ranges::find(kListed, name) != kListed.end();
}

// Below a mode or a subclass of Python's, PyTorch reports "PythonDispatchMode" or "PythonSubclass":
// then the program's code runs inside of the operator, and may copy what it likes. So may a kernel
// that a library has put in the place of PyTorch's.
void TableLog::enter(std::string_view name, bool is_own) {
  if (depth_ > 0 && !(name.starts_with("aten::") && is_own)) is_trusted_ = false;
  if (!is_listed(name) || depth_++ > 0) return;
  first_ = count_nodes(driver_, stream_, kUnknown);
  is_trusted_ = is_own;
}

// PyTorch frees its pinned memory within the operator. It reuses none of what was allocated in a
// capture and copied from (CachingHostAllocator::free), and nothing ran in this thread since.
void TableLog::leave(std::string_view name) noexcept {
  if (!is_listed(name) || --depth_ > 0 || !is_trusted_) return;
  try {
    const CUgraph graph = captured_graph(driver_, stream_);
    if (graph == nullptr) return;
    std::vector<HostTable> read =
        read_host_tables(driver_, graph, first_, count_nodes(driver_, stream_));
    std::ranges::move(read, std::back_inserter(tables_));
  } catch (const std::exception&) {
    // The graph will be refused, because of the copy.
  }
}

TableMemory& table_memory(const Driver& driver, int device) {
  // Never destroyed: graphs may outlive everything else.
  static auto* mutex = new std::mutex;
  static auto* memory = new std::map<int, std::unique_ptr<TableMemory>>;
  const std::lock_guard lock(*mutex);
  std::unique_ptr<TableMemory>& found = (*memory)[device];
  if (!found) found = std::make_unique<TableMemory>(driver);
  return *found;
}

}  // namespace pygraph::bindings
