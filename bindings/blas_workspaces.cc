#include "blas_workspaces.h"

#include <dlfcn.h>

#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

namespace pygraph {
namespace {

using Find = BlasWorkspaces& (*)();

std::array<BlasWorkspaces*, 2> find_workspaces() {
  constexpr std::array kNames = {"_ZN2at4cuda33cublas_handle_stream_to_workspaceEv",
                                 "_ZN2at4cuda35cublaslt_handle_stream_to_workspaceEv"};
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) throw std::runtime_error("this PyTorch is built without CUDA");
  std::array<BlasWorkspaces*, 2> found{};
  for (size_t i = 0; i < kNames.size(); ++i) {
    const auto find = reinterpret_cast<Find>(dlsym(library, kNames[i]));
    if (find == nullptr) {
      throw std::runtime_error("this PyTorch does not tell its workspaces for cuBLAS");
    }
    found[i] = &find();
  }
  return found;
}

const std::array<BlasWorkspaces*, 2>& workspaces() {
  static const std::array<BlasWorkspaces*, 2> found = find_workspaces();
  return found;
}

}  // namespace

BlasWorkspacesAside::BlasWorkspacesAside(Range stand_ins) : stand_ins_(stand_ins) {
  for (size_t i = 0; i < kept_.size(); ++i) {
    const std::lock_guard lock(workspaces()[i]->mutex);
    std::swap(workspaces()[i]->map, kept_[i]);
  }
}

BlasWorkspacesAside::~BlasWorkspacesAside() {
  for (size_t i = 0; i < kept_.size(); ++i) {
    BlasWorkspaces::Map made;
    {
      const std::lock_guard lock(workspaces()[i]->mutex);
      made = std::exchange(workspaces()[i]->map, std::move(kept_[i]));
      for (auto& [key, memory] : made) {
        const bool is_stand_in = stand_ins_.contains(reinterpret_cast<uint64_t>(memory.get()));
        // Another thread's: it stays, unless there was one before.
        if (!is_stand_in) workspaces()[i]->map.try_emplace(key, std::move(memory));
      }
    }
  }  // what is left in `made` is freed here
}

std::vector<uint64_t> BlasWorkspacesAside::stand_ins() const {
  std::vector<uint64_t> addresses;
  for (BlasWorkspaces* all : workspaces()) {
    const std::shared_lock lock(all->mutex);
    for (const auto& [key, memory] : all->map) {
      const auto address = reinterpret_cast<uint64_t>(memory.get());
      if (stand_ins_.contains(address)) addresses.push_back(address);
    }
  }
  return addresses;
}

void free_blas_workspaces() {
  for (BlasWorkspaces* all : workspaces()) {
    std::vector<at::DataPtr> freed;
    const std::lock_guard lock(all->mutex);
    for (auto it = all->map.begin(); it != all->map.end();) {
      const bool is_default_stream = std::get<1>(it->first) == nullptr;
      if (is_default_stream) freed.push_back(std::move(it->second));
      it = is_default_stream ? all->map.erase(it) : std::next(it);
    }
  }
}

}  // namespace pygraph
