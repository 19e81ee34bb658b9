// What one uncaptured call of a Python function reads, writes and makes, operator by operator.
//
// At a replay the function's Python does not run, so all memory that its kernels use must be known
// beforehand. PyTorch reports every operator on this thread (at::RecordFunction, the profiler's
// interface) with its inputs and outputs. A storage that is an input, and was not an output of an
// operator of the call before, is *state*: a parameter, a buffer, an optimizer's moments, an
// argument. A storage that is first seen as an output was *born* in the call.
//
// Of PyTorch's own operators only the outermost count: an operator that they call gets its memory
// from their arguments, or from allocations of theirs, some of which are made without an operator.
//
// Compiled code makes tensors without an operator. So memory that PyTorch's allocator has handed
// out on this thread since the call began is born as well (c10::MemoryReportingInfoBase, the
// profiler's interface, too).
//
// The observer keeps nothing alive: its references are weak. It does not see kernels that are
// launched without an operator (Triton's, from Python); their memory must be found otherwise.
#pragma once

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace pygraph::bindings {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// A tensor that a storage was read or written through.
struct SeenTensor {
  WeakTensor tensor;
  // Its version then. None if it has none, or if the storage had been written before.
  std::optional<uint32_t> version;
};

struct SeenStorage {
  WeakStorage storage;
  c10::Device device;
  c10::ScalarType dtype{};  // of the tensor that it was first seen through
  size_t bytes = 0;
  std::string user;  // the operator that was first given it, or that made it
  bool is_born = false;
  bool is_written = false;
  std::vector<SeenTensor> tensors;  // not of what was born
};

// How often autograd was told that the tensor was written. None if it has no counter, as tensors
// that were made in inference mode.
std::optional<uint32_t> version_of(const at::Tensor& tensor);

class FreshMemory;

// Observes from construction to end(), or destruction, on the constructing thread. One at a time in
// a thread, and not while a profiler is active, which uses the same thread-local place. Not
// thread-safe.
class CallObserver {
 public:
  // `note_uncapturable` is called with the name of each operator that waits for the GPU, or in
  // which ranks communicate, before it runs; it must not throw. Throws std::runtime_error where the
  // thread is observed already.
  explicit CallObserver(pybind11::function note_uncapturable);
  ~CallObserver();
  CallObserver(const CallObserver&) = delete;
  CallObserver& operator=(const CallObserver&) = delete;

  void end();

  // In the order in which they were first seen. Null for what was not seen.
  const std::vector<SeenStorage>& storages() const { return storages_; }
  const SeenStorage* find(const at::Tensor& tensor) const;
  // The sequence numbers of autograd's nodes that ran.
  const std::vector<int64_t>& backward_nodes() const { return backward_nodes_; }
  // The first operator that worked on tensors whose memory is not known: sparse ones, subclasses in
  // Python, wrappers of torch.func. Or why an operator could not be looked at. Empty for none.
  const std::string& unknown() const { return unknown_; }

 private:
  static std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function);
  static void leave(const at::RecordFunction& function, at::ObserverContext* context);
  void note_inputs(const at::RecordFunction& function);
  void note_uncapturable(const at::RecordFunction& function);
  void note_outputs(const at::RecordFunction& function);
  SeenStorage& note(const at::Tensor& tensor, const char* name, bool is_output);

  pybind11::function note_uncapturable_;
  std::vector<SeenStorage> storages_;
  std::unordered_map<const c10::StorageImpl*, size_t> index_;  // of storages_
  std::vector<int64_t> backward_nodes_;
  bool is_observing_ = true;
  std::shared_ptr<FreshMemory> fresh_;
  std::optional<c10::DebugInfoGuard> guard_;
  int depth_ = 0;               // of operators inside each other
  bool is_inside_own_ = false;  // whether the outermost one is PyTorch's own
  std::string unknown_;
  at::CallbackHandle handle_;
};

}  // namespace pygraph::bindings
