// The state of a callable: memory that it reads or writes and that is not passed to it.
//
// Each storage of the state becomes one more argument of the graph, a flat tensor that covers the
// storage. Replays get the addresses of these tensors at each call, as those of any argument.
//
// A storage has *owners*: the tensors through which the program uses it (a parameter, a buffer, a
// moment of an optimizer). A program can give an owner other memory (`p.data = q`), or drop it. The
// next run of the callable would then use other memory, so the state is not valid any more.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "callables/call_observer.h"
#include "callables/pointer_set.h"

namespace pygraph::bindings {

// Not thread-safe beyond Python's lock, which is also held when owners are freed.
class State {
 public:
  // The state consists of the memory on `device` that `observer` has seen and that was not born in
  // the call, and of the memory of `reachable` tensors on the device, which kernels that are
  // launched without an operator may use; without the memory of `excluded` tensors.
  State(const CallObserver& observer, const std::vector<at::Tensor>& reachable,
        const std::vector<at::Tensor>& excluded, c10::Device device);

  // A tensor through which the program uses a storage.
  struct Owner {
    WeakTensor tensor;
    const c10::StorageImpl* memory;  // that it had
    size_t item;                     // the number of its flat tensor
  };
  // Tensor by tensor.
  const std::vector<Owner>& owners() const { return owners_; }
  // Of a living one.
  static bool has_its_memory(const Owner& owner);

  // The flat tensors; they keep the memory alive.
  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  // The name of an operator that uses memory without a living owner; empty if there is none.
  const std::string& unowned() const { return unowned_; }

  // Positions of the storages that the observer saw written.
  std::vector<uint32_t> written() const;

  // Counts owners among `tensors` as written: their counters have increased in the call.
  void count(const std::vector<at::Tensor>& tensors);

  // Whether each storage has owners, and all owners still have it.
  bool is_valid() const;
  // Whether the tensors overlap each other, or lie in a storage of the state. (Small gradients and
  // those in buckets are parts of one storage that do not overlap.)
  bool is_shared_by(const pybind11::list& tensors) const;
  // Increases the version counters of owners, so that autograd knows that they were written: of
  // those that count() was given; of the storages that the observer saw written, also of those
  // whose counters have increased since an operator was given them first, or may have. (Operators
  // such as fused optimizers do not count.) Of other storages at `positions`, by tensor: of all
  // owners. Throws std::out_of_range.
  void bump_versions(const pybind11::list& positions) const;

 private:
  struct ItsOwner {
    WeakTensor tensor;
    bool is_counted;  // whether the call has increased its counter, or may have
  };
  struct Item {
    std::vector<ItsOwner> owners;
    bool is_written = false;
  };
  void add(const at::Tensor& tensor, bool is_counted, std::vector<Item>& items);
  static void add_owner(Item& item, const ItsOwner& owner);
  void keep(const std::vector<Item>& items);
  static void bump(const WeakTensor& owner);
  void prefetch_after(size_t i) const;

  std::vector<at::Tensor> tensors_;
  // Read at each call, so in a row: the owners of each tensor's storage, tensor by tensor; where a
  // tensor's begin (and behind the last one, where all end); whether it was seen written.
  std::vector<Owner> owners_;
  std::vector<size_t> first_owner_;
  std::vector<bool> is_written_;
  std::vector<WeakTensor> counted_;  // owners
  std::unordered_map<const c10::StorageImpl*, size_t> index_;
  PointerSet memory_;  // the keys of index_
  std::string unowned_;
};

// A flat tensor of this type that covers the storage, as far as its bytes are elements.
at::Tensor flat_tensor(const c10::Storage& storage, c10::ScalarType dtype);

}  // namespace pygraph::bindings
