// A look at memory before PyTorch's allocator has it back.
//
// Who wants to know what a call has written into its arguments must read them after the call. To
// hold them until then takes memory that the call would free on its way, in a backward most of what
// it has.
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

// Calls `look(i, bytes)` once for each tensor i, with all bytes of its storage: when that memory is
// freed, or at end(). The bytes are there until it returns. Holds nothing alive. What `look` raises
// is only shown.
//
// Meanwhile Tensor.record_stream does nothing for these tensors, because the allocator does not
// know the memory for its own. Needs Python's lock; tensors may be freed by any thread.
class LastLook {
 public:
  LastLook(const std::vector<at::Tensor>& tensors, pybind11::function look);
  LastLook(const LastLook&) = delete;
  LastLook& operator=(const LastLook&) = delete;
  ~LastLook();

  void end();

 private:
  struct Memory;

  void put_back(bool looks);
  static void free(void* memory);
  static void look_at(const Memory& memory, at::Tensor bytes);

  std::shared_ptr<pybind11::function> look_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
};

}  // namespace pygraph::bindings
