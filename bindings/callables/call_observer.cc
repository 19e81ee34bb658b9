#include "callables/call_observer.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "record/memory_reports.h"
#include "record/operator_schema.h"
#include "replay/graphed_callable.h"

namespace pygraph::bindings {
namespace {

thread_local CallObserver* t_observer = nullptr;

// Operators that wait for the GPU whenever an argument is on it.
constexpr std::array<std::string_view, 6> kWaiting = {"aten::_local_scalar_dense", "aten::nonzero",
                                                      "aten::masked_select",       "aten::_unique2",
                                                      "aten::unique_dim",          "aten::equal"};

bool is_on_gpu(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda();
}

bool is_on_cpu(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().is_cpu();
}

bool is_collective(std::string_view name) {
  constexpr std::array<std::string_view, 3> kNamespaces = {"c10d::", "_c10d_functional",
                                                           "symm_mem::"};
  return std::ranges::any_of(kNamespaces, [&](auto prefix) { return name.starts_with(prefix); });
}

bool is_uncapturable(std::string_view name, c10::ArrayRef<const c10::IValue> inputs) {
  if (is_collective(name)) return true;
  if (inputs.empty()) return false;
  // A copy to the host.
  if (name == "aten::copy_") {
    return inputs.size() > 1 && is_on_cpu(inputs[0]) && is_on_gpu(inputs[1]);
  }
  return std::ranges::find(kWaiting, name) != kWaiting.end() && is_on_gpu(inputs[0]);
}

// A compiler's tensors while it traces, including those that claim to be on another device. The
// size of their storage may be a symbol, which has no value yet.
bool has_no_memory(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.unsafeGetTensorImpl()->unsafe_storage().device().is_meta();
}

bool is_written(const at::RecordFunction& function, const c10::FunctionSchema& schema, size_t i) {
  const c10::Argument& argument = schema.arguments()[i];
  if (is_own(function.name())) return may_write(schema, argument);
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

}  // namespace

std::optional<uint32_t> version_of(const at::Tensor& tensor) {
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  if (!counter.enabled()) return std::nullopt;
  return counter.current_version();
}

// The addresses that the allocators have handed out on this thread, and that were not freed.
class FreshMemory : public MemoryReports {
 public:
  // Called under the allocator's lock: must not allocate from it, throw, or take Python's lock.
  void reportMemoryUsage(void* pointer, int64_t size, size_t /*total_allocated*/,
                         size_t /*total_reserved*/, c10::Device /*device*/) override {
    if (size > 0) {
      addresses_.insert(pointer);
    } else {
      addresses_.erase(pointer);
    }
  }
  bool contains(const void* address) const { return addresses_.contains(address); }

 private:
  std::unordered_set<const void*> addresses_;
};

CallObserver::CallObserver(pybind11::function note_uncapturable)
    : note_uncapturable_(std::move(note_uncapturable)) {
  if (t_observer != nullptr) throw std::runtime_error("a call is observed already");
  t_observer = this;
  fresh_ = std::make_shared<FreshMemory>();
  guard_.emplace(c10::DebugInfoKind::PROFILER_STATE, fresh_);
  handle_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&enter, &leave)
          .needsInputs(true)
          .needsOutputs(true)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  begin_observed_calls();
}

CallObserver::~CallObserver() {
  end();
}

void CallObserver::end() {
  if (!is_observing_) return;
  is_observing_ = false;
  end_observed_calls();
  guard_.reset();
  at::removeCallback(handle_);
  t_observer = nullptr;
}

const SeenStorage* CallObserver::find(const at::Tensor& tensor) const {
  if (!tensor.has_storage()) return nullptr;
  const auto found = index_.find(tensor.storage().unsafeGetStorageImpl());
  return found == index_.end() ? nullptr : &storages_[found->second];
}

// PyTorch swallows exceptions of callbacks, so they are stored.
std::unique_ptr<at::ObserverContext> CallObserver::enter(const at::RecordFunction& function) {
  if (t_observer == nullptr || !is_operator(function)) return nullptr;
  const bool is_node = function.scope() == at::RecordScope::BACKWARD_FUNCTION;
  const bool is_outermost = !is_node && t_observer->depth_++ == 0;
  if (is_outermost) t_observer->is_inside_own_ = is_own(function.name());
  try {
    if (is_node) {
      t_observer->backward_nodes_.push_back(function.seqNr());
    } else {
      if (is_outermost || !t_observer->is_inside_own_) t_observer->note_inputs(function);
      t_observer->note_uncapturable(function);
    }
  } catch (const std::exception& error) {
    t_observer->unknown_ = std::string(function.name()) + " (" + error.what() + ")";
  }
  return nullptr;
}

void CallObserver::leave(const at::RecordFunction& function, at::ObserverContext* /*context*/) {
  if (t_observer == nullptr || function.scope() != at::RecordScope::FUNCTION) return;
  if (!is_operator(function)) return;
  --t_observer->depth_;
  try {
    t_observer->note_outputs(function);
  } catch (const std::exception& error) {
    t_observer->unknown_ = std::string(function.name()) + " (" + error.what() + ")";
  }
}

void CallObserver::note_inputs(const at::RecordFunction& function) {
  const auto schema = function.operator_schema();
  const c10::ArrayRef<const c10::IValue> inputs = function.inputs();
  const bool is_described = schema && schema->arguments().size() == inputs.size();
  for (size_t i = 0; i < inputs.size(); ++i) {
    for_each_tensor(inputs[i], [&](const at::Tensor& tensor) {
      // A Python number that an operator has converted to a tensor for another operator.
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number() || has_no_memory(tensor)) return;
      if (!is_plain(tensor)) {
        if (unknown_.empty()) unknown_ = function.name();
        return;
      }
      SeenStorage& seen = note(tensor, function.name(), false);
      seen.is_written |= is_described && is_written(function, *schema, i);
    });
  }
}

void CallObserver::note_uncapturable(const at::RecordFunction& function) {
  if (!is_uncapturable(function.name(), function.inputs())) return;
  const pybind11::gil_scoped_acquire locked;
  note_uncapturable_(function.name());
}

void CallObserver::note_outputs(const at::RecordFunction& function) {
  for (const c10::IValue& output : function.outputs()) {
    for_each_tensor(output, [&](const at::Tensor& tensor) {
      if (!has_no_memory(tensor) && is_plain(tensor)) note(tensor, function.name(), true);
    });
  }
}

SeenStorage& CallObserver::note(const at::Tensor& tensor, const char* name, bool is_output) {
  const auto& storage = tensor.storage();
  auto entry = index_.find(storage.unsafeGetStorageImpl());
  if (entry == index_.end()) {
    // storage.data() may throw, so the storage gets its number only afterwards.
    const bool is_born = is_output || fresh_->contains(storage.data());
    storages_.push_back({storage.getWeakStorageImpl(),
                         storage.device(),
                         tensor.scalar_type(),
                         storage.nbytes(),
                         name,
                         is_born,
                         false,
                         {}});
    entry = index_.emplace(storage.unsafeGetStorageImpl(), storages_.size() - 1).first;
  }
  SeenStorage& seen = storages_[entry->second];
  if (seen.is_born) return seen;
  const auto is_it = [&](const SeenTensor& known) {
    return known.tensor._unsafe_get_target() == tensor.unsafeGetTensorImpl();
  };
  if (std::ranges::none_of(seen.tensors, is_it)) {
    seen.tensors.push_back({WeakTensor(tensor.getIntrusivePtr()),
                            seen.is_written ? std::nullopt : version_of(tensor)});
  }
  return seen;
}

}  // namespace pygraph::bindings
