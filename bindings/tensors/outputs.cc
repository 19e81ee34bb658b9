#include "tensors/outputs.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <map>
#include <utility>

#include "conversions.h"
#include "pygraph/alignment.h"

namespace py = pybind11;

namespace pygraph::bindings {
namespace {

// Of a shared block; the buffers in it are smaller. Requests up to 1 MiB come from segments for
// small ones, so blocks do not break up the memory of larger tensors. And inputs of 1 MiB and more
// are what a backward reuses (kSmallestDonation in pygraph/join_saved.h). A block must not be one:
// where the forward is not replayed, its tensors have storages of their own, and a graph that
// counts on the block cannot be used. (Blocks that are to be reused: saved_blocks.h.)
constexpr uint64_t kLargestBlock = (uint64_t{1} << 20) - kAllocationAlignment;

// Which argument owns this storage, or -1.
Py_ssize_t find_argument(const at::Tensor& tensor, PyObject* stand_ins) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(stand_ins); ++i) {
    PyObject* object = PyList_GET_ITEM(stand_ins, i);
    if (THPVariable_Check(object) && unpack_tensor(object).storage().unsafeGetStorageImpl() ==
                                         tensor.storage().unsafeGetStorageImpl()) {
      return i;
    }
  }
  return -1;
}

Py_ssize_t find_object(PyObject* object, PyObject* sequence, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (item(sequence, i) == object) return i;
  }
  return -1;
}

void describe_layout(const at::Tensor& tensor, int64_t base_offset, Output& output) {
  output.sizes = tensor.sizes().vec();
  output.strides = tensor.strides().vec();
  output.dtype = tensor.dtype();
  output.conj_neg = conj_neg_bits_of(tensor);
  output.byte_offset =
      tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize()) - base_offset;
}

at::Tensor make_view(const Output& output, PyObject* arguments) {
  const at::Tensor& base = unpack_tensor(PyList_GET_ITEM(arguments, output.source));
  const int64_t base_offset = base.storage_offset() * static_cast<int64_t>(base.itemsize());
  return make_tensor(base.storage(), output.dtype, output.sizes, output.strides,
                     base_offset + output.byte_offset, output.conj_neg);
}

}  // namespace

std::vector<uint8_t> used_only_at(const OutputPlan& plan, const std::vector<uint32_t>& positions) {
  std::vector<uint8_t> is_listed(plan.outputs.size(), 0);
  for (const uint32_t position : positions) is_listed.at(position) = 1;
  std::vector<uint8_t> result(plan.buffers.size(), 1);
  for (size_t i = 0; i < plan.outputs.size(); ++i) {
    const Output& output = plan.outputs[i];
    if (output.kind == OutputKind::kFresh && is_listed[i] == 0) result[output.source] = 0;
  }
  return result;
}

void OutputPlan::check_equal(const OutputPlan& other) const {
  if (outputs == other.outputs && block_bytes == other.block_bytes) return;
  throw NotRelocatable("the two recordings differ: what they return");
}

OutputPlan plan_outputs(PyObject* returned, PyObject* stand_ins, Range space) {
  if (!PyTuple_Check(returned) && !PyList_Check(returned)) {
    throw NotRelocatable("the function does not return a list or tuple");
  }
  OutputPlan plan;
  plan.is_tuple = PyTuple_Check(returned);
  std::map<const c10::StorageImpl*, uint32_t> storages;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(returned);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* object = item(returned, i);
    Output output;
    bool is_persistent = false;
    const Py_ssize_t repeated = find_object(object, returned, i);
    const Py_ssize_t argument = find_object(object, stand_ins, PyList_GET_SIZE(stand_ins));
    if (!THPVariable_Check(object)) {
      is_persistent = true;
    } else if (argument >= 0) {
      output.kind = OutputKind::kArgument;
      output.source = static_cast<uint32_t>(argument);
    } else if (repeated >= 0) {
      output.kind = OutputKind::kRepeated;
      output.source = static_cast<uint32_t>(repeated);
    } else {
      const at::Tensor& tensor = unpack_tensor(object);
      const auto address = reinterpret_cast<uint64_t>(tensor.storage().mutable_data());
      const Py_ssize_t owner = find_argument(tensor, stand_ins);
      if (!tensor.is_cuda()) {
        throw NotRelocatable("output " + std::to_string(i) + " is on the CPU");
      }
      if (owner >= 0) {
        const at::Tensor& base = unpack_tensor(PyList_GET_ITEM(stand_ins, owner));
        output.kind = OutputKind::kView;
        output.source = static_cast<uint32_t>(owner);
        describe_layout(tensor, base.storage_offset() * static_cast<int64_t>(base.itemsize()),
                        output);
      } else if (space.contains(address) || tensor.storage().nbytes() == 0) {
        const auto next = static_cast<uint32_t>(storages.size());
        const auto [entry, is_new] =
            storages.emplace(tensor.storage().unsafeGetStorageImpl(), next);
        if (is_new) {
          plan.buffers.push_back({tensor.storage().nbytes(), address, next});
          plan.block_bytes.push_back(tensor.storage().nbytes());
          plan.block_donors.push_back(OutputPlacement::kNone);
        }
        output.kind = OutputKind::kFresh;
        output.source = entry->second;
        describe_layout(tensor, 0, output);
      } else {
        is_persistent = true;  // not memory of this recording: the same at every call
      }
    }
    plan.outputs.push_back(std::move(output));
    plan.persistent.push_back(py::reinterpret_borrow<py::object>(is_persistent ? object : nullptr));
  }
  return plan;
}

void share_blocks(OutputPlan& plan, const std::vector<uint32_t>& positions) {
  const std::vector<uint8_t> may_share = used_only_at(plan, positions);
  plan.block_bytes.clear();
  constexpr uint32_t kNone = ~uint32_t{0};
  uint32_t shared = kNone;  // the block that is being filled
  for (size_t i = 0; i < plan.buffers.size(); ++i) {
    OutputBuffer& buffer = plan.buffers[i];
    const bool is_shared = may_share[i] != 0 && buffer.bytes > 0 && buffer.bytes < kLargestBlock;
    const bool fits =
        shared != kNone && plan.block_bytes[shared] + align_up(buffer.bytes) <= kLargestBlock;
    if (!is_shared || !fits) {
      buffer.block = static_cast<uint32_t>(plan.block_bytes.size());
      buffer.offset = 0;
      plan.block_bytes.push_back(is_shared ? align_up(buffer.bytes) : buffer.bytes);
      if (is_shared) shared = buffer.block;
      continue;
    }
    buffer.block = shared;
    buffer.offset = plan.block_bytes[shared];
    plan.block_bytes[shared] += align_up(buffer.bytes);
  }
  plan.block_donors.assign(plan.block_bytes.size(), OutputPlacement::kNone);
}

std::vector<const OutputBuffer*> output_slots(const OutputPlan& plan) {
  std::vector<const OutputBuffer*> slots;
  for (const OutputBuffer& buffer : plan.buffers) {
    if (buffer.bytes > 0) slots.push_back(&buffer);
  }
  return slots;
}

std::vector<uint32_t> sharing_slots(const OutputPlan& plan,
                                    const std::vector<uint32_t>& positions) {
  const std::vector<uint8_t> may_share = used_only_at(plan, positions);
  std::vector<uint32_t> slots;
  uint32_t slot = 0;
  for (size_t i = 0; i < plan.buffers.size(); ++i) {
    if (plan.buffers[i].bytes == 0) continue;
    if (may_share[i] != 0) slots.push_back(slot);
    ++slot;
  }
  return slots;
}

void apply_placements(OutputPlan& plan, const std::vector<OutputPlacement>& donors) {
  const std::vector<uint64_t> old_bytes = std::exchange(plan.block_bytes, {});
  plan.block_donors.clear();
  std::vector<uint32_t> buffers_in(old_bytes.size(), 0);
  for (const OutputBuffer& buffer : plan.buffers) ++buffers_in[buffer.block];
  std::map<std::pair<uint32_t, uint32_t>, uint32_t> blocks;  // by donor, or else by old number
  uint32_t slot = 0;
  for (OutputBuffer& buffer : plan.buffers) {
    OutputPlacement donor = buffer.bytes > 0 ? donors[slot++] : OutputPlacement{};
    if (buffers_in[buffer.block] > 1) donor = {};  // small ones; their memory is one already
    const std::pair key(donor.input, donor ? 0 : buffer.block);
    const auto next = static_cast<uint32_t>(plan.block_bytes.size());
    const auto [entry, is_new] = blocks.emplace(key, next);
    if (is_new) {
      plan.block_bytes.push_back(donor ? 0 : old_bytes[buffer.block]);
      plan.block_donors.push_back(donor.input);
    }
    buffer.block = entry->second;
    if (!donor) continue;
    buffer.offset = donor.offset;
    uint64_t& bytes = plan.block_bytes[buffer.block];
    bytes = std::max(bytes, buffer.offset + buffer.bytes);
  }
}

at::Tensor make_tensor(const c10::Storage& storage, caffe2::TypeMeta dtype, c10::IntArrayRef sizes,
                       c10::IntArrayRef strides, int64_t byte_offset, ConjNegBits conj_neg) {
  // A view of an argument that the graph only hands through may be one on the CPU.
  const auto key = storage.device().is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage),
                                                               c10::DispatchKeySet(key), dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
      sizes, strides, byte_offset / static_cast<int64_t>(dtype.itemsize()));
  set_conj_neg_bits(tensor, conj_neg);
  return tensor;
}

static PyObject* build_output(const OutputPlan& plan, Py_ssize_t i,
                              const std::vector<c10::Storage>& blocks, PyObject* arguments,
                              PyObject* result) {
  const Output& output = plan.outputs[i];
  switch (output.kind) {
    case OutputKind::kFresh: {
      const OutputBuffer& buffer = plan.buffers[output.source];
      return THPVariable_Wrap(
          make_tensor(blocks[buffer.block], output.dtype, output.sizes, output.strides,
                      static_cast<int64_t>(buffer.offset) + output.byte_offset, output.conj_neg));
    }
    case OutputKind::kArgument:
      return Py_NewRef(PyList_GET_ITEM(arguments, output.source));
    case OutputKind::kView:
      return THPVariable_Wrap(make_view(output, arguments));
    case OutputKind::kRepeated:
      return Py_NewRef(item(result, output.source));
    case OutputKind::kPersistent:
      break;
  }
  return Py_NewRef(plan.persistent[i].ptr());
}

PyObject* build_outputs(const OutputPlan& plan, const std::vector<c10::Storage>& blocks,
                        PyObject* arguments, const std::vector<PyObject*>& instead) {
  const auto count = static_cast<Py_ssize_t>(plan.outputs.size());
  PyObject* result = plan.is_tuple ? PyTuple_New(count) : PyList_New(count);
  if (result == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* object = instead.empty() || instead[i] == nullptr
                           ? build_output(plan, i, blocks, arguments, result)
                           : Py_NewRef(instead[i]);
    if (object == nullptr) {
      Py_DECREF(result);
      return nullptr;
    }
    if (plan.is_tuple) {
      PyTuple_SET_ITEM(result, i, object);
    } else {
      PyList_SET_ITEM(result, i, object);
    }
  }
  return result;
}

}  // namespace pygraph::bindings
