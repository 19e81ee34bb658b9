// The workspaces that PyTorch keeps for cuBLAS: one per library handle (that is, thread) and
// stream.
//
// A recording is made on a stream that nothing else uses, so it finds no workspace. Its kernels use
// a stand-in of the recording, which must be removed from PyTorch's maps afterwards. Entries of
// other threads are never touched: one may be about to launch a kernel with the workspace that it
// has found there, and if that memory were freed and the allocator's cache emptied meanwhile, the
// kernel would read memory that is not mapped. (at::cuda::clearCublasWorkspaces, which PyTorch's
// own graphs call, does that.)
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

// Exists during a recording of this thread.
class RecordedBlasWorkspaces {
 public:
  // `stand_ins`: the addresses of the recording. Throws std::runtime_error where this PyTorch keeps
  // its workspaces elsewhere.
  explicit RecordedBlasWorkspaces(Range stand_ins);
  // Frees the recording's workspaces.
  ~RecordedBlasWorkspaces();
  // Which handles of cuBLAS are this thread's: those whose workspaces it has allocated itself.
  // (Autograd's threads have handles of their own, with which they work for other threads, too.)
  void note_own(const std::vector<uint64_t>& allocated_here);
  // Addresses of the recording's workspaces so far.
  std::vector<uint64_t> stand_ins() const;
  RecordedBlasWorkspaces(const RecordedBlasWorkspaces&) = delete;
  RecordedBlasWorkspaces& operator=(const RecordedBlasWorkspaces&) = delete;

 private:
  Range stand_ins_;
};

// The workspaces of all threads for streams other than the default one. A recording whose function
// also works on such a stream uses that stream's workspaces. Thread-safe.
std::vector<Range> side_blas_workspaces();

// Whether any thread has a workspace for the stream. A new stream may have one of a destroyed
// stream with the same handle. Thread-safe.
bool has_blas_workspace(CUstream stream);

// Frees this thread's workspaces of the default stream, if the thread has made a recording that
// used cuBLAS. No graph can hold them, because nothing can be captured on that stream. PyTorch
// allocates others when needed.
void free_blas_workspaces();

}  // namespace pygraph::bindings
