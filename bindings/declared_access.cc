#include "declared_access.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "node_count.h"

namespace pygraph {
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
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined() && tensor.is_cuda()) visit(tensor);
  } else if (value.isTensorList() || value.isList()) {
    for (const c10::IValue& element : value.toListRef()) for_each_tensor(element, visit);
  }
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
    node.declared = true;
    node.op = number;
    for (const uint32_t offset : node.address_offsets()) {
      uint64_t word = 0;
      std::memcpy(&word, node.image.data() + offset, sizeof word);
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
      std::memcpy(&address, node.image.data() + offset, sizeof address);
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
  node.declared = true;
  node.reads = std::move(reads);
  node.writes = std::move(writes);
}

}  // namespace

OperatorLog::OperatorLog(const Driver& driver, CUstream stream, Range space)
    : driver_(driver), stream_(stream), space_(space) {
  t_log = this;
  handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&enter, &leave)
                                           .needsInputs(true)
                                           .scopes({at::RecordScope::FUNCTION}));
}

OperatorLog::~OperatorLog() {
  at::removeCallback(handle_);
  t_log = nullptr;
}

std::unique_ptr<at::ObserverContext> OperatorLog::enter(const at::RecordFunction& function) {
  OperatorLog& log = *t_log;
  if (!is_listed(function) || log.depth_++ > 0) return nullptr;
  const auto schema = function.operator_schema();
  const c10::ArrayRef<const c10::IValue> inputs = function.inputs();
  log.current_ = {};
  log.current_.first = count_nodes(log.driver_, log.stream_);
  log.is_known_ = schema.has_value() && schema->arguments().size() == inputs.size();
  if (!log.is_known_) return nullptr;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const c10::AliasInfo* alias = schema->arguments()[i].alias_info();
    for_each_tensor(inputs[i], [&](const at::Tensor& tensor) {
      if (!tensor.has_storage()) {
        log.is_known_ = false;
        return;
      }
      const Range storage = storage_of(tensor);
      const bool is_written = alias != nullptr && alias->isWrite();
      (is_written ? log.current_.writes : log.current_.reads).push_back(storage);
      // What it writes must be a symbol.
      if (is_written && !log.space_.contains(storage.address)) log.is_known_ = false;
    });
  }
  return nullptr;
}

void OperatorLog::leave(const at::RecordFunction& function, at::ObserverContext* /*context*/) {
  OperatorLog& log = *t_log;
  if (!is_listed(function) || --log.depth_ > 0) return;
  log.current_.last = count_nodes(log.driver_, log.stream_);
  if (log.is_known_) log.operators_.push_back(std::move(log.current_));
}

void declare_accesses(Recording& recording, const std::vector<RecordedOperator>& operators,
                      const std::unordered_map<uint64_t, ParameterAccess>& kernels) {
  for (uint32_t i = 0; i < operators.size(); ++i) declare_operator(recording, operators[i], i);
  for (Node& node : recording.nodes) {
    if (node.kind != NodeKind::kKernel || node.parent >= 0 || node.declared) continue;
    const auto access = kernels.find(reinterpret_cast<uint64_t>(node.function));
    if (access != kernels.end()) declare_kernel(recording, node, access->second);
  }
}

}  // namespace pygraph
