// Exchanges the memory of storages temporarily, so that everything that uses the storages
// (parameters, views, optimizers) works on other memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace pygraph::bindings {

// The memory is put back by undo(), or by the destructor. Meanwhile no other thread may use the
// tensors. Not thread-safe.
class StorageExchange {
 public:
  // The storage of each tensor of `own` gets the memory of the tensor of `given` at the same place,
  // from its first element on, which `given` goes on owning. Throws std::invalid_argument if there
  // is too little of it; nothing is exchanged then.
  StorageExchange(const std::vector<at::Tensor>& own, std::vector<at::Tensor> given);
  ~StorageExchange();
  StorageExchange(const StorageExchange&) = delete;
  StorageExchange& operator=(const StorageExchange&) = delete;

  void undo() noexcept;

 private:
  struct Exchanged {
    c10::Storage storage;
    c10::DataPtr memory;  // its own
  };
  std::vector<Exchanged> exchanged_;
  std::vector<at::Tensor> given_;
};

}  // namespace pygraph::bindings
