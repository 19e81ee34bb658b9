#include "record/declared_access.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "record/node_count.h"
#include "record/operator_schema.h"
#include "record/own_kernels.h"
#include "torch_private/torch_cuda.h"

namespace pygraph::bindings {
namespace {

// Operators whose kernels find all that they access in their parameters. Overloads and variants
// with another schema are told apart by it.
constexpr std::array<std::string_view, 17> kListed = {
    "aten::mm",
    "aten::addmm",
    "aten::_addmm_activation",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_int_mm",
    "aten::_scaled_mm",
    "aten::convolution",
    "aten::convolution_backward",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_efficient_attention_backward",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_cudnn_attention_backward",
    "aten::max_pool2d_with_indices",
    "aten::max_pool2d_with_indices_backward"};

bool is_listed(const at::RecordFunction& function) {
  return std::ranges::find(kListed, std::string_view(function.name())) != kListed.end();
}

thread_local OperatorLog* t_log = nullptr;

// Calls `visit` for each tensor on a GPU in the value.
template <typename Visit>
void for_each_gpu_tensor(const c10::IValue& value, const Visit& visit) {
  for_each_tensor(value, [&](const at::Tensor& tensor) {
    if (tensor.is_cuda()) visit(tensor);
  });
}

// Also the address past its end, from which a kernel may count backwards. (Where something else
// begins there, its use counts for this too, which can only keep more of the order.)
bool points_to(const Range& range, uint64_t word) {
  return word - range.address <= range.size;
}

Range storage_of(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  return {reinterpret_cast<uint64_t>(storage.data()), storage.nbytes()};
}

void declare_operator(Recording& recording, RecordedOperator op, uint32_t number) {
  for (const Allocation& allocation : recording.allocations) {
    const bool is_scratch = recording.is_scratch(allocation.address, allocation.last);
    const bool is_made_here = op.first <= allocation.first && allocation.first <= op.last;
    if (is_scratch || is_made_here) op.writes.push_back({allocation.address, allocation.size});
  }
  for (Node& node : recording.nodes) {
    if (node.position < op.first || node.position >= op.last || node.parent >= 0) continue;
    if (node.kind == NodeKind::kChildGraph) continue;
    node.has_known_accesses = true;
    node.op = number;
    for (const uint32_t offset : node.address_offsets()) {
      const uint64_t word = node.word_at(offset);
      const auto is_meant = [&](const Range& range) { return points_to(range, word); };
      if (std::ranges::any_of(op.writes, is_meant)) {
        node.writes.push_back(offset);
      } else if (std::ranges::any_of(op.reads, is_meant)) {
        node.reads.push_back(offset);
      }
    }
  }
}

void declare_kernel(const Recording& recording, Node& node, const ParameterAccess& access) {
  if (node.packed || node.params.size() < access.size()) return;
  std::vector<uint32_t> reads;
  std::vector<uint32_t> writes;
  for (size_t i = 0; i < node.params.size(); ++i) {
    const bool is_launchers = i >= access.size();
    if (!is_launchers && access[i] == '-') continue;
    const auto [offset, size] = node.params[i];
    uint64_t address = 0;
    if (size == sizeof address) {
      address = node.word_at(static_cast<uint32_t>(offset));
    } else if (!is_launchers) {
      return;
    }
    const bool is_symbol = recording.address_space.contains(address);
    if (is_launchers) {
      if (is_symbol) return;  // memory that is not understood
    } else if (access[i] == 'r') {
      reads.push_back(static_cast<uint32_t>(offset));
    } else if (is_symbol) {
      writes.push_back(static_cast<uint32_t>(offset));
    } else {
      return;  // it writes to memory that is no symbol
    }
  }
  node.has_known_accesses = true;
  node.reads = std::move(reads);
  node.writes = std::move(writes);
}

bool is_still_pytorchs(const at::RecordFunction& function) {
  const auto name = function.operator_name();
  return name.has_value() && has_own_kernels(*name);
}

}  // namespace

void RecordedOperators::doubt_workspaces() {
  for (Operator& op : all) op.is_on_side_stream = true;
  for (Operator& op : inner) op.is_on_side_stream = true;
}

OperatorLog::OperatorLog(const Driver& driver, int device, CUstream stream, Range space)
    : driver_(driver), device_(device), stream_(stream), space_(space), tables_(driver, stream) {
  t_log = this;
  handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&enter, &leave)
                                           .needsInputs(true)
                                           .scopes({at::RecordScope::FUNCTION}));
}

OperatorLog::~OperatorLog() {
  at::removeCallback(handle_);
  t_log = nullptr;
}

RecordedOperators OperatorLog::take() {
  operators_.tables = tables_.take();
  return std::move(operators_);
}

// PyTorch hands the callbacks on to threads that work for this one (autograd's): what they launch
// is no known operator's. It swallows exceptions, so they are kept for declare_accesses().
std::unique_ptr<at::ObserverContext> OperatorLog::enter(const at::RecordFunction& function) {
  if (t_log == nullptr || !is_operator(function)) return nullptr;
  const int depth = t_log->depth_++;
  const bool is_outermost_listed = is_listed(function) && t_log->listed_depth_++ == 0;
  try {
    t_log->tables_.enter(function.name(),
                         !TableLog::is_listed(function.name()) || is_still_pytorchs(function));
    t_log->enter_any(function, depth);
    if (is_outermost_listed) t_log->enter_listed(function);
  } catch (const std::exception& error) {
    t_log->operators_.failure = std::string(function.name()) + ": " + error.what();
  }
  return nullptr;
}

void OperatorLog::enter_any(const at::RecordFunction& function, int depth) {
  const std::string_view name = function.name();
  const bool is_foreign = !is_own(name);
  if (custom_depth_ == 0 && is_custom(function)) custom_depth_ = depth + 1;
  operators_.uses_fft_plans |= name.starts_with("aten::_fft_");
  const bool is_inner = depth > 0 && !is_foreign && outermost_.is_foreign && inner_depth_ == 0;
  if (depth == 0) {
    begin(outermost_, function);
  } else if (is_inner) {
    begin(inner_, function);
    inner_.is_called_by_custom = custom_depth_ > 0;
    inner_depth_ = depth;
    note_arguments(inner_, function, is_foreign);
    return;
  } else if (!is_foreign) {  // the outer one's schema tells what is written
    Operator& outer = inner_depth_ > 0 ? inner_ : outermost_;
    note_tensors(outer, function);
    return;
  }
  outermost_.is_foreign |= is_foreign;
  inner_.is_foreign |= is_foreign;
  note_arguments(outermost_, function, is_foreign);
}

void OperatorLog::begin(Operator& op, const at::RecordFunction& function) const {
  op = {};
  op.name = function.name();
  op.first = counted_nodes(driver_, stream_);
  op.is_on_side_stream = torch_cuda::current_stream(device_) != stream_;
}

void OperatorLog::note_arguments(Operator& op, const at::RecordFunction& function,
                                 bool is_foreign) {
  const auto schema = function.operator_schema();
  const c10::ArrayRef<const c10::IValue> inputs = function.inputs();
  const bool is_described = !is_foreign && schema && schema->arguments().size() == inputs.size();
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool is_written = !is_described || may_write(*schema, schema->arguments()[i]);
    for_each_gpu_tensor(inputs[i], [&](const at::Tensor& tensor) {
      op.is_foreign |= !is_plain(tensor);
      if (!tensor.has_storage()) return;
      op.arguments.push_back(storage_of(tensor));
      if (is_written) op.writes.push_back(storage_of(tensor));
    });
  }
}

void OperatorLog::note_tensors(Operator& op, const at::RecordFunction& function) {
  for (const c10::IValue& input : function.inputs()) {
    for_each_gpu_tensor(input, [&](const at::Tensor& tensor) {
      if (tensor.has_storage()) op.arguments.push_back(storage_of(tensor));
    });
  }
}

void OperatorLog::enter_listed(const at::RecordFunction& function) {
  const auto schema = function.operator_schema();
  const c10::ArrayRef<const c10::IValue> inputs = function.inputs();
  listed_ = {};
  listed_.first = counted_nodes(driver_, stream_);
  is_known_ = schema.has_value() && schema->arguments().size() == inputs.size();
  if (!is_known_) return;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const c10::AliasInfo* alias = schema->arguments()[i].alias_info();
    for_each_gpu_tensor(inputs[i], [&](const at::Tensor& tensor) {
      if (!tensor.has_storage()) {
        is_known_ = false;
        return;
      }
      const Range storage = storage_of(tensor);
      const bool is_written = alias != nullptr && alias->isWrite();
      (is_written ? listed_.writes : listed_.reads).push_back(storage);
      // What it writes must be a symbol.
      if (is_written && !space_.contains(storage.address)) is_known_ = false;
    });
  }
}

void OperatorLog::leave(const at::RecordFunction& function, at::ObserverContext* /*context*/) {
  if (t_log == nullptr || !is_operator(function)) return;
  OperatorLog& log = *t_log;
  log.tables_.leave(function.name());
  const int depth = --log.depth_;
  const bool is_outermost_listed = is_listed(function) && --log.listed_depth_ == 0;
  try {
    if (is_outermost_listed) log.leave_listed();
    log.leave_any(depth);
  } catch (const std::exception& error) {
    log.operators_.failure = std::string(function.name()) + ": " + error.what();
  }
}

void OperatorLog::leave_listed() {
  listed_.last = counted_nodes(driver_, stream_);
  if (is_known_) operators_.listed.push_back(std::move(listed_));
}

void OperatorLog::leave_any(int depth) {
  if (inner_depth_ > 0 && depth == inner_depth_) {
    inner_.last = counted_nodes(driver_, stream_);
    operators_.inner.push_back(std::move(inner_));
    inner_depth_ = 0;
  }
  if (custom_depth_ == depth + 1) custom_depth_ = 0;
  if (depth > 0) return;
  outermost_.last = counted_nodes(driver_, stream_);
  operators_.all.push_back(std::move(outermost_));
}

void declare_accesses(Recording& recording, RecordedOperators operators,
                      const std::unordered_map<uint64_t, ParameterAccess>& kernels) {
  if (!operators.failure.empty()) {
    throw NotRelocatable("what an operator writes is not known: " + operators.failure);
  }
  recording.operators = std::move(operators.all);
  recording.inner_operators = std::move(operators.inner);
  recording.tables = std::move(operators.tables);
  for (uint32_t i = 0; i < operators.listed.size(); ++i) {
    declare_operator(recording, std::move(operators.listed[i]), i);
  }
  for (Node& node : recording.nodes) {
    if (node.kind != NodeKind::kKernel || node.parent >= 0 || node.has_known_accesses) continue;
    const auto access = kernels.find(reinterpret_cast<uint64_t>(node.function));
    if (access != kernels.end()) declare_kernel(recording, node, access->second);
  }
}

}  // namespace pygraph::bindings
