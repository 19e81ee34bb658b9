// The workspaces that PyTorch keeps for cuBLAS: one per library handle (that is, thread) and
// stream.
//
// A recording must find none, so that what its kernels use is a stand-in of the recording; and
// nobody else may find the recording's afterwards. Freeing all of PyTorch's for that, as its own
// graphs do (at::cuda::clearCublasWorkspaces), would pull them from under a torch.cuda.graph of the
// user's that was captured on the stream it was warmed up on. So they are set aside meanwhile.
#pragma once

#include <c10/core/Allocator.h>

#include <array>
#include <map>
#include <shared_mutex>
#include <tuple>

#include "pygraph/recording.h"

namespace pygraph {

// As at::cuda::WorkspaceMapWithMutex (ATen/cuda/CUDAContextLight.h), by handle and stream.
struct BlasWorkspaces {
  using Map = std::map<std::tuple<void*, void*>, at::DataPtr>;
  Map map;
  std::shared_mutex mutex;
};

class BlasWorkspacesAside {
 public:
  // `stand_ins`: the addresses of the recording. Throws std::runtime_error where this PyTorch keeps
  // its workspaces elsewhere.
  explicit BlasWorkspacesAside(Range stand_ins);
  // Puts the workspaces back and frees the recording's.
  ~BlasWorkspacesAside();
  // Addresses of the recording's workspaces so far.
  std::vector<uint64_t> stand_ins() const;
  BlasWorkspacesAside(const BlasWorkspacesAside&) = delete;
  BlasWorkspacesAside& operator=(const BlasWorkspacesAside&) = delete;

 private:
  Range stand_ins_;
  std::array<BlasWorkspaces::Map, 2> kept_;  // cuBLAS's and cuBLASLt's
};

// Frees the workspaces of the default stream, which no graph can have been captured on. Who needs
// one later gets one again.
void free_blas_workspaces();

}  // namespace pygraph
