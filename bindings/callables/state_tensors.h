// The tensors of a known call's state, compared in one pass.
//
// Three comparisons read what a tensor holds: whether it still has its memory (state.h), whether
// its layout, attributes and hooks are as they were (host_watch.h), and whether it has a gradient
// (tensors/gradients.h). It lies in up to eight lines of the CPU's caches, which are mostly gone at
// the next call, and models have hundreds of tensors. So a tensor that all are about is read once,
// and compared with what it held when the call was first seen. If that differs, the comparisons
// themselves decide.
//
// A tensor without autograd's description has no hooks: PyTorch's setters make one. Which object it
// belongs to, the tensor says, too (torch.utils.swap_tensors).
#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "callables/autograd_graph.h"
#include "callables/host_watch.h"
#include "callables/state.h"

namespace pygraph::bindings {

// To be used with Python's lock. Refers to all that it was made of.
class StateTensors {
 public:
  // `differentiated`: a list of tensors; `pattern`: which of them have gradients before a call.
  StateTensors(const State& state, const HostWatch& watch, PyObject* differentiated,
               std::string pattern);

  // state.is_valid(), has_gradient_pattern(), and what `watch` knows of its tensors.
  bool hold();

 private:
  // PyTorch's references to nodes, which differ between releases.
  using StrongNode = decltype(torch::autograd::AutogradMeta::grad_fn_);
  using WeakNode = decltype(torch::autograd::AutogradMeta::grad_accumulator_);
  enum class Gradient : uint8_t { kAny, kNone, kSome };
  // What many tensors have in common: a model's weights and their moments.
  struct Kind {
    PyTypeObject* type;
    ptrdiff_t place;  // of the pointer to the attributes, in bytes from the object
    c10::DispatchKeySet keys;
    caffe2::TypeMeta dtype;
    GradientKind gradient;
    std::vector<int64_t> sizes, strides;
    int64_t offset;
    bool operator==(const Kind&) const = default;
  };
  // A tensor that is an owner in the state and is watched. All entries are read at each call, so
  // one should fit into a line of the caches.
  struct Entry {
    WeakTensor tensor;
    const c10::StorageImpl* storage;
    PyObject* object;
    PyObject* attributes;                     // a dictionary
    torch::autograd::AutogradMeta* autograd;  // null if it has none
    uint32_t kind;                            // in kinds_
    uint32_t watched;                         // its number in the watch
    Gradient gradient = Gradient::kAny;
    // The last node that accumulated gradients, once it has gone; or none.
    WeakNode dead_accumulator = WeakNode(StrongNode());
  };
  bool add(const State::Owner& owner, size_t watched);
  uint32_t number_of(Kind kind);
  void note_dead_accumulator(Entry& entry) const;
  void expect_gradients();
  void prefetch_after(size_t i) const;
  bool is_unchanged(const Entry& entry) const;
  static bool has_its_layout(const Kind& kind, const c10::TensorImpl& tensor);
  bool has_its_autograd(const Entry& entry) const;
  bool holds(const Entry& entry) const;
  bool rest_is_owned() const;
  bool rest_has_pattern() const;

  const State& state_;
  const HostWatch& watch_;
  PyObject* differentiated_;
  std::string pattern_;
  size_t watched_count_;
  std::vector<Entry> entries_;
  std::vector<Kind> kinds_;
  // What has no entry, by number: owners of storages without entries, and of others; tensors of the
  // watch; tensors of `differentiated`.
  std::vector<size_t> owners_;
  std::vector<size_t> further_owners_;
  std::vector<size_t> watched_;
  std::vector<Py_ssize_t> others_;
  size_t storages_ = 0;  // without entries
};

}  // namespace pygraph::bindings
