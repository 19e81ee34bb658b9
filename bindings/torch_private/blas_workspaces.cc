#include "torch_private/blas_workspaces.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "torch_private/torch_cuda.h"

namespace pygraph::bindings {
namespace {

template <typename Result>
auto find_function(const char* name) -> Result (*)() {
  return reinterpret_cast<Result (*)()>(torch_cuda::find_function(name));
}

std::array<BlasWorkspaces*, 2> find_workspaces() {
  std::array<BlasWorkspaces*, 2> found{};
  for (size_t i = 0; const char* name : {"_ZN2at4cuda33cublas_handle_stream_to_workspaceEv",
                                         "_ZN2at4cuda35cublaslt_handle_stream_to_workspaceEv"}) {
    const auto function = find_function<BlasWorkspaces&>(name);
    if (function == nullptr) {
      throw std::runtime_error("this PyTorch does not tell its workspaces for cuBLAS");
    }
    found[i++] = &function();
  }
  return found;
}

const std::array<BlasWorkspaces*, 2>& workspaces() {
  static const std::array<BlasWorkspaces*, 2> found = find_workspaces();
  return found;
}

uint64_t address_of(const at::DataPtr& memory) {
  return reinterpret_cast<uint64_t>(memory.get());
}

[[maybe_unused]] uint64_t address_of(const std::pair<at::DataPtr, size_t>& memory) {
  return address_of(memory.first);
}

// Before 2.13 the maps have no sizes. PyTorch may share a workspace between both libraries, so it
// has the larger of their sizes. Release 2.12 exports that of cuBLASLt alone: then the end of a
// larger workspace is not known to be one, and what refers to it is refused.
[[maybe_unused]] uint64_t size_of(const at::DataPtr& /*memory*/) {
  static const uint64_t size = [] {
    uint64_t largest = 0;
    for (const char* name :
         {"_ZN2at4cuda22getChosenWorkspaceSizeEv", "_ZN2at4cuda26getCUDABlasLtWorkspaceSizeEv"}) {
      const auto function = find_function<size_t>(name);
      if (function != nullptr) largest = std::max<uint64_t>(largest, function());
    }
    return largest;
  }();
  return size;
}

[[maybe_unused]] uint64_t size_of(const std::pair<at::DataPtr, size_t>& memory) {
  return memory.second;
}

// Of this thread, which no other uses while it runs, as far as recordings have shown them. A handle
// is the thread's that made it, and so that which allocates the handle's workspaces.
std::set<void*>& own_handles() {
  thread_local std::set<void*> handles;
  return handles;
}

// Frees the workspaces that `is_freed` names, by their entries in the maps.
template <typename Predicate>
void free_where(const Predicate& is_freed) {
  for (BlasWorkspaces* all : workspaces()) {
    std::vector<BlasWorkspaces::Memory> freed;  // without the lock
    const std::lock_guard lock(all->mutex);
    for (auto it = all->map.begin(); it != all->map.end();) {
      const bool is_it = is_freed(*it);
      if (is_it) freed.push_back(std::move(it->second));
      it = is_it ? all->map.erase(it) : std::next(it);
    }
  }
}

}  // namespace

BlasWorkspacesAside::BlasWorkspacesAside(CUstream stream)
    : aside_{{{*workspaces()[0], stream}, {*workspaces()[1], stream}}} {}

RecordedBlasWorkspaces::RecordedBlasWorkspaces(CUstream stream, Range stand_ins)
    : stream_(stream), stand_ins_(stand_ins) {}

RecordedBlasWorkspaces::~RecordedBlasWorkspaces() {
  free_where([&](const auto& entry) { return stand_ins_.contains(address_of(entry.second)); });
}

void RecordedBlasWorkspaces::note_own(const std::vector<uint64_t>& allocated_here) {
  for (BlasWorkspaces* all : workspaces()) {
    const std::shared_lock lock(all->mutex);
    for (const auto& [key, memory] : all->map) {
      const bool is_own =
          std::ranges::find(allocated_here, address_of(memory)) != allocated_here.end();
      if (is_own) own_handles().insert(std::get<0>(key));
    }
  }
}

std::vector<uint64_t> RecordedBlasWorkspaces::stand_ins() const {
  std::vector<uint64_t> addresses;
  for (BlasWorkspaces* all : workspaces()) {
    const std::shared_lock lock(all->mutex);
    for (const auto& [key, memory] : all->map) {
      const auto address = address_of(memory);
      if (stand_ins_.contains(address)) addresses.push_back(address);
    }
  }
  return addresses;
}

bool RecordedBlasWorkspaces::uses_other_memory() const {
  return std::ranges::any_of(workspaces(), [&](BlasWorkspaces* all) {
    const std::shared_lock lock(all->mutex);
    return std::ranges::any_of(all->map, [&](const auto& entry) {
      return std::get<1>(entry.first) == stream_ && !stand_ins_.contains(address_of(entry.second));
    });
  });
}

std::vector<Range> side_blas_workspaces() {
  std::vector<Range> found;
  for (BlasWorkspaces* all : workspaces()) {
    const std::shared_lock lock(all->mutex);
    for (const auto& [key, memory] : all->map) {
      if (std::get<1>(key) != nullptr) found.push_back({address_of(memory), size_of(memory)});
    }
  }
  return found;
}

void free_blas_workspaces() {
  free_where([](const auto& entry) {
    const auto& [handle, stream] = entry.first;
    return stream == nullptr && own_handles().contains(handle);
  });
}

}  // namespace pygraph::bindings
