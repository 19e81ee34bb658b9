// Observes memory just before it is freed.
//
// To detect what a call has written, its arguments must be read after their last use. References
// held until the end of the call would keep alive memory that the call frees (in a backward, most
// of it). Instead, the storage's deleter is replaced, and the bytes are read just before they are
// freed.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

namespace pygraph::bindings {

// All bytes of the tensor's storage, which the result keeps alive.
at::Tensor memory_of(const at::Tensor& tensor);

// Calls `observe(i, bytes)` once for each tensor i, with all bytes of its storage: when that memory
// is freed, or at end(). The bytes are valid until it returns. Keeps nothing alive. Exceptions of
// `observe` are printed only.
//
// Meanwhile Tensor.record_stream does nothing for these tensors, because the allocator does not
// know the memory for its own. Needs Python's lock; tensors may be freed by any thread.
class FreeObserver {
 public:
  FreeObserver(const std::vector<at::Tensor>& tensors, pybind11::function observe);
  FreeObserver(const FreeObserver&) = delete;
  FreeObserver& operator=(const FreeObserver&) = delete;
  ~FreeObserver();

  void end();

 private:
  struct Memory;

  void put_back(bool reports);
  static void free(void* memory);
  static void report(const Memory& memory, at::Tensor bytes);

  std::shared_ptr<pybind11::function> observe_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
};

}  // namespace pygraph::bindings
