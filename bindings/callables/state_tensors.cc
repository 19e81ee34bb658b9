#include "callables/state_tensors.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "callables/attributes.h"
#include "tensors/prefetch.h"

namespace pygraph::bindings {
namespace {

torch::autograd::AutogradMeta* autograd_of(const c10::TensorImpl& tensor) {
  return static_cast<torch::autograd::AutogradMeta*>(tensor.autograd_meta());
}

// Whether two references are to the same node, or both to none. Reads nothing of the node.
template <class T>
bool is_same_node(const std::weak_ptr<T>& one, const std::weak_ptr<T>& other) {
  return !one.owner_before(other) && !other.owner_before(one);
}

template <class T>
bool is_same_node(const c10::weak_intrusive_ptr<T>& one, const c10::weak_intrusive_ptr<T>& other) {
  return one._unsafe_get_target() == other._unsafe_get_target();
}

PyObject** place_in(PyObject* object, ptrdiff_t place) {
  return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + place);
}

const THPVariable& variable_of(PyObject* object) {
  return *reinterpret_cast<const THPVariable*>(object);
}

// For a few numbers faster than the operator, which calls memcmp().
bool are_equal(c10::IntArrayRef numbers, const std::vector<int64_t>& others) {
  if (numbers.size() != others.size()) return false;
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] != others[i]) return false;
  }
  return true;
}

}  // namespace

StateTensors::StateTensors(const State& state, const HostWatch& watch, PyObject* differentiated,
                           std::string pattern)
    : state_(state),
      watch_(watch),
      differentiated_(differentiated),
      pattern_(std::move(pattern)),
      watched_count_(watch.tensor_count()) {
  std::unordered_map<const c10::TensorImpl*, size_t> numbers;  // in the watch
  for (size_t i = 0; i < watched_count_; ++i) {
    numbers.emplace(THPVariable_Unpack(watch.tensor(i)).unsafeGetTensorImpl(), i);
  }
  std::vector<bool> has_entry(watched_count_);
  std::vector<bool> is_owned(state.tensors().size());  // by an entry
  std::vector<size_t> rest;
  for (size_t i = 0; i < state.owners().size(); ++i) {
    const State::Owner& owner = state.owners()[i];
    const auto number = numbers.find(owner.tensor._unsafe_get_target());
    if (number != numbers.end() && add(owner, number->second)) {
      has_entry[number->second] = true;
      is_owned[owner.item] = true;
    } else {
      rest.push_back(i);
    }
  }
  for (const size_t i : rest) {
    (is_owned[state.owners()[i].item] ? further_owners_ : owners_).push_back(i);
  }
  storages_ = static_cast<size_t>(std::ranges::count(is_owned, false));
  for (size_t i = 0; i < watched_count_; ++i) {
    if (!has_entry[i]) watched_.push_back(i);
  }
  expect_gradients();
}

// False if it is no tensor of the usual kind, or is not as it was.
bool StateTensors::add(const State::Owner& owner, size_t watched) {
  if (owner.tensor.expired() || !State::has_its_memory(owner) || !watch_.tensor_holds(watched)) {
    return false;
  }
  const c10::TensorImpl& tensor = *owner.tensor._unsafe_get_target();
  PyObject* object = watch_.tensor(watched);
  auto* autograd = autograd_of(tensor);
  PyObject** place = place_of_attributes(object);
  const THPVariable& variable = variable_of(object);
  const bool has_hooks =
      variable.backward_hooks != nullptr || variable.post_accumulate_grad_hooks != nullptr;
  if (tensor.layout() != c10::kStrided || tensor.has_symbolic_sizes_strides() ||
      tensor.pyobj_slot()->load_pyobj() != object || place == nullptr || has_hooks ||
      (autograd != nullptr && autograd->grad_fn_)) {
    return false;
  }
  const uint32_t kind =
      number_of({Py_TYPE(object), reinterpret_cast<char*>(place) - reinterpret_cast<char*>(object),
                 tensor.key_set(), tensor.dtype(), gradient_kind_of(autograd), tensor.sizes().vec(),
                 tensor.strides().vec(), tensor.storage_offset()});
  entries_.push_back(
      {owner.tensor, owner.memory, object, *place, autograd, kind, static_cast<uint32_t>(watched)});
  note_dead_accumulator(entries_.back());
  return true;
}

uint32_t StateTensors::number_of(Kind kind) {
  const auto known = std::ranges::find(kinds_, kind);
  const auto number = static_cast<uint32_t>(known - kinds_.begin());
  if (known == kinds_.end()) kinds_.push_back(std::move(kind));
  return number;
}

// A node that has gone does not come back, and its memory is not reused while a reference is left.
// Locked, because an operator of another thread, without Python's lock, may make another node.
void StateTensors::note_dead_accumulator(Entry& entry) const {
  if (!kinds_[entry.kind].gradient.requires_grad ||
      autograd_of(*entry.tensor._unsafe_get_target()) != entry.autograd) {
    return;
  }
  const std::lock_guard lock(entry.autograd->mutex_);
  const auto& node = entry.autograd->grad_accumulator_;
  if (node.expired()) entry.dead_accumulator = node;
}

void StateTensors::expect_gradients() {
  std::unordered_map<PyObject*, Entry*> by_object;
  for (Entry& entry : entries_) by_object.emplace(entry.object, &entry);
  for (Py_ssize_t i = 0; i < std::ssize(pattern_); ++i) {
    const auto found = i < PyList_GET_SIZE(differentiated_)
                           ? by_object.find(PyList_GET_ITEM(differentiated_, i))
                           : by_object.end();
    if (found == by_object.end() || found->second->gradient != Gradient::kAny) {
      others_.push_back(i);
    } else {
      const bool has_one = pattern_[static_cast<size_t>(i)] != 0;
      found->second->gradient = has_one ? Gradient::kSome : Gradient::kNone;
    }
  }
}

// Asks for the memory that a later comparison will read.
void StateTensors::prefetch_after(size_t i) const {
  constexpr size_t kAhead = 8;
  if (i + kAhead >= entries_.size()) return;
  const Entry& later = entries_[i + kAhead];
  prefetch(later.tensor._unsafe_get_target(), sizeof(c10::TensorImpl));
  prefetch(later.object, sizeof(THPVariable));
  prefetch(place_in(later.object, kinds_[later.kind].place), sizeof(PyObject*));
  if (later.autograd == nullptr) return;
  const torch::autograd::AutogradMeta& autograd = *later.autograd;
  prefetch(&autograd.grad_, sizeof autograd.grad_ + sizeof autograd.grad_fn_);
  prefetch(&autograd.grad_accumulator_, sizeof(void*));
  prefetch(&autograd.requires_grad_, 1);
}

bool StateTensors::has_its_layout(const Kind& kind, const c10::TensorImpl& tensor) {
  return are_equal(tensor.sizes(), kind.sizes) && are_equal(tensor.strides(), kind.strides) &&
         tensor.storage_offset() == kind.offset;
}

// The tensor's own description, which is still there.
bool StateTensors::has_its_autograd(const Entry& entry) const {
  const THPVariable& variable = variable_of(entry.object);
  const GradientKind& gradient = kinds_[entry.kind].gradient;
  // A node that accumulates may have hooks, which holds() asks for. (PyTorch may make one
  // meanwhile, in another thread: this compares with what was there before or after.)
  if (gradient.requires_grad &&
      !is_same_node(entry.autograd->grad_accumulator_, entry.dead_accumulator)) {
    return false;
  }
  return variable.backward_hooks == nullptr && variable.post_accumulate_grad_hooks == nullptr &&
         gradient_kind_of(entry.autograd) == gradient && !entry.autograd->grad_fn_ &&
         (entry.gradient == Gradient::kAny ||
          entry.autograd->grad_.defined() == (entry.gradient == Gradient::kSome));
}

bool StateTensors::is_unchanged(const Entry& entry) const {
  if (entry.tensor.expired()) return false;
  const c10::TensorImpl& tensor = *entry.tensor._unsafe_get_target();
  const Kind& kind = kinds_[entry.kind];
  if (tensor.unsafe_storage().unsafeGetStorageImpl() != entry.storage ||
      tensor.pyobj_slot()->load_pyobj() != entry.object || Py_TYPE(entry.object) != kind.type ||
      *place_in(entry.object, kind.place) != entry.attributes || tensor.key_set() != kind.keys ||
      tensor.dtype() != kind.dtype || autograd_of(tensor) != entry.autograd ||
      !has_its_layout(kind, tensor)) {
    return false;
  }
  return entry.autograd != nullptr ? has_its_autograd(entry) : entry.gradient != Gradient::kSome;
}

// As the comparisons that the entry stands for.
bool StateTensors::holds(const Entry& entry) const {
  const at::Tensor& tensor = THPVariable_Unpack(entry.object);
  if (tensor.unsafeGetTensorImpl() != entry.tensor._unsafe_get_target()) return false;
  if (!tensor.has_storage() ||
      tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() != entry.storage ||
      !watch_.tensor_holds(entry.watched)) {
    return false;
  }
  return entry.gradient == Gradient::kAny ||
         tensor.grad().defined() == (entry.gradient == Gradient::kSome);
}

bool StateTensors::rest_is_owned() const {
  size_t owned = 0;  // storages, whose owners are in a row
  size_t last = state_.tensors().size();
  for (const size_t i : owners_) {
    const State::Owner& owner = state_.owners()[i];
    if (owner.tensor.expired()) continue;
    if (!State::has_its_memory(owner)) return false;
    if (owner.item != last) ++owned;
    last = owner.item;
  }
  return owned == storages_ && std::ranges::all_of(further_owners_, [&](size_t i) {
           const State::Owner& owner = state_.owners()[i];
           return owner.tensor.expired() || State::has_its_memory(owner);
         });
}

bool StateTensors::rest_has_pattern() const {
  if (PyList_GET_SIZE(differentiated_) != std::ssize(pattern_)) return false;
  return std::ranges::all_of(others_, [&](Py_ssize_t i) {
    const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(differentiated_, i));
    return tensor.grad().defined() == (pattern_[static_cast<size_t>(i)] != 0);
  });
}

bool StateTensors::hold() {
  if (watch_.tensor_count() != watched_count_) return false;
  for (size_t i = 0; i < entries_.size(); ++i) {
    prefetch_after(i);
    Entry& entry = entries_[i];
    if (is_unchanged(entry)) continue;
    if (!holds(entry)) return false;
    note_dead_accumulator(entry);
  }
  return rest_is_owned() && rest_has_pattern() &&
         std::ranges::all_of(watched_, [&](size_t i) { return watch_.tensor_holds(i); });
}

}  // namespace pygraph::bindings
