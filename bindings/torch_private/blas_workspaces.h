// The workspaces that PyTorch keeps for cuBLAS: one per library handle (that is, thread) and
// stream. Since release 2.15 it keeps them only with TORCH_CUBLAS_WORKSPACE_CACHE=1; else each
// product allocates its own.
//
// A recording is made on a stream that nothing else uses. Its kernels use a stand-in of the
// recording, which must be removed from PyTorch's maps afterwards. A workspace that is there for
// that stream all the same is set aside meanwhile: it may be of a destroyed stream that had the
// same handle. It is not freed, because a graph that the program has captured may use it. From
// release 2.12 on, PyTorch frees the workspaces of a captured graph's stream when the graph is
// reset, so they are set aside until then.
//
// Entries of other threads for other streams are never touched: one may be about to launch a kernel
// with the workspace that it has found there, and if that memory were freed and the allocator's
// cache emptied meanwhile, the kernel would read memory that is not mapped.
// (at::cuda::clearCublasWorkspaces, which PyTorch's own graphs call, does that.)
#pragma once

#include <c10/core/Allocator.h>
#include <torch/headeronly/version.h>

#include <array>
#include <map>
#include <shared_mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "pygraph/recording.h"
#include "torch_private/set_aside.h"

namespace pygraph::bindings {

// As at::cuda::WorkspaceMapWithMutex (ATen/cuda/CUDAContextLight.h), by handle and stream. The
// layout depends on the release, but the name of the function that returns it does not, so no
// compiler or loader detects a wrong declaration.
struct BlasWorkspaces {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
  using Memory = at::DataPtr;
#else
  using Memory = std::pair<at::DataPtr, size_t>;  // and its size
#endif
  using Map = std::map<std::tuple<void*, void*>, Memory>;
  Map map;
  std::shared_mutex mutex;
};

// Takes a stream's workspaces out of PyTorch's maps, until it is destroyed. Throws
// std::runtime_error where this PyTorch keeps its workspaces elsewhere.
class BlasWorkspacesAside {
 public:
  explicit BlasWorkspacesAside(CUstream stream);

 private:
  std::array<SetAside<BlasWorkspaces>, 2> aside_;
};

// Exists during a recording of this thread.
class RecordedBlasWorkspaces {
 public:
  // `stream`: that of the recording. `stand_ins`: its addresses. Throws std::runtime_error where
  // this PyTorch keeps its workspaces elsewhere.
  RecordedBlasWorkspaces(CUstream stream, Range stand_ins);
  // Frees the recording's workspaces.
  ~RecordedBlasWorkspaces();
  // Which handles of cuBLAS are this thread's: those whose workspaces it has allocated itself.
  // (Autograd's threads have handles of their own, with which they work for other threads, too.)
  void note_own(const std::vector<uint64_t>& allocated_here);
  // Addresses of the recording's workspaces so far.
  std::vector<uint64_t> stand_ins() const;
  // Whether the stream has got a workspace in other memory meanwhile.
  bool uses_other_memory() const;
  RecordedBlasWorkspaces(const RecordedBlasWorkspaces&) = delete;
  RecordedBlasWorkspaces& operator=(const RecordedBlasWorkspaces&) = delete;

 private:
  CUstream stream_;
  Range stand_ins_;
};

// The workspaces of all threads for streams other than the default one. A recording whose function
// also works on such a stream uses that stream's workspaces. Thread-safe.
std::vector<Range> side_blas_workspaces();

// Frees this thread's workspaces of the default stream, if the thread has made a recording that
// used cuBLAS. No graph can hold them, because nothing can be captured on that stream. PyTorch
// allocates others when needed.
void free_blas_workspaces();

}  // namespace pygraph::bindings
