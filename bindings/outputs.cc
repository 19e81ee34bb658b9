#include "outputs.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/core/Allocator.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/python_variable.h>

#include <map>

#include "arguments.h"

namespace pygraph {
namespace {

constexpr uint64_t kAlignment = 512;
// Larger tensors get memory of their own: the cost of an allocation does not count there, and a
// backward can reuse them one by one (see donation.h).
constexpr uint64_t kLargestInBlock = uint64_t{1} << 20;

uint64_t align_up(uint64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Device memory that several storages share; freed with the last of them.
struct SharedBlock : c10::intrusive_ptr_target {
  explicit SharedBlock(c10::DataPtr given) : memory(std::move(given)) {}
  c10::DataPtr memory;
};

c10::DataPtr part_of(const c10::intrusive_ptr<SharedBlock>& block, uint64_t offset,
                     c10::Device device) {
  auto* address = static_cast<std::byte*>(block->memory.get()) + offset;
  c10::raw::intrusive_ptr::incref(block.get());
  return {address, block.get(),
          [](void* context) {
            c10::raw::intrusive_ptr::decref(static_cast<c10::intrusive_ptr_target*>(context));
          },
          device};
}

PyObject* item(PyObject* sequence, Py_ssize_t i) {
  return PyTuple_Check(sequence) ? PyTuple_GET_ITEM(sequence, i) : PyList_GET_ITEM(sequence, i);
}

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
  output.byte_offset =
      tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize()) - base_offset;
}

at::Tensor make_tensor(const c10::Storage& storage, const Output& output, int64_t byte_offset) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), output.dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
      output.sizes, output.strides, byte_offset / static_cast<int64_t>(output.dtype.itemsize()));
  return tensor;
}

at::Tensor make_view(const Output& output, PyObject* arguments) {
  const at::Tensor& base = unpack_tensor(PyList_GET_ITEM(arguments, output.source));
  const int64_t base_offset = base.storage_offset() * static_cast<int64_t>(base.itemsize());
  return make_tensor(base.storage(), output, base_offset + output.byte_offset);
}

}  // namespace

bool Output::same_layout(const Output& other) const {
  return kind == other.kind && source == other.source && sizes == other.sizes &&
         strides == other.strides && byte_offset == other.byte_offset && dtype == other.dtype;
}

OutputPlan::~OutputPlan() {
  for (PyObject* object : persistent) Py_XDECREF(object);
}

void OutputPlan::check_equal(const OutputPlan& other) const {
  bool equal = outputs.size() == other.outputs.size() && storage_bytes == other.storage_bytes;
  for (size_t i = 0; equal && i < outputs.size(); ++i) {
    equal = outputs[i].same_layout(other.outputs[i]);
  }
  if (!equal) throw NotRelocatable("the two recordings differ: what they return");
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
    PyObject* persistent = nullptr;
    const Py_ssize_t repeated = find_object(object, returned, i);
    const Py_ssize_t argument = find_object(object, stand_ins, PyList_GET_SIZE(stand_ins));
    if (!THPVariable_Check(object)) {
      persistent = Py_NewRef(object);
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
          plan.storage_bytes.push_back(tensor.storage().nbytes());
          plan.storage_addresses.push_back(address);
        }
        output.kind = OutputKind::kFresh;
        output.source = entry->second;
        describe_layout(tensor, 0, output);
      } else {
        persistent = Py_NewRef(object);  // not memory of this recording: the same at every call
      }
    }
    plan.outputs.push_back(std::move(output));
    plan.persistent.push_back(persistent);
  }
  plan.is_saved.assign(plan.storage_bytes.size(), 0);
  return plan;
}

void mark_saved(OutputPlan& plan, const std::vector<uint32_t>& positions) {
  std::vector<uint8_t> is_saved_output(plan.outputs.size(), 0);
  for (const uint32_t position : positions) is_saved_output.at(position) = 1;
  plan.is_saved.assign(plan.storage_bytes.size(), 1);
  for (size_t i = 0; i < plan.outputs.size(); ++i) {
    const Output& output = plan.outputs[i];
    if (output.kind == OutputKind::kFresh && is_saved_output[i] == 0) {
      plan.is_saved[output.source] = 0;
    }
  }
  for (size_t s = 0; s < plan.storage_bytes.size(); ++s) {
    if (plan.storage_bytes[s] > kLargestInBlock) plan.is_saved[s] = 0;
  }
}

std::vector<c10::Storage> allocate_storages(const OutputPlan& plan, c10::Device device,
                                            std::span<const uint32_t> donors, PyObject* arguments,
                                            Donations& donations) {
  static c10::Allocator* allocator = c10::GetAllocator(device.type());
  const bool use_block = !at::SavedTensorDefaultHooks::get_hooks().has_value();
  const auto in_block = [&](size_t i) { return use_block && plan.is_saved[i] != 0; };
  uint64_t block_bytes = 0;
  for (size_t i = 0; i < plan.storage_bytes.size(); ++i) {
    if (in_block(i)) block_bytes += align_up(plan.storage_bytes[i]);
  }
  c10::intrusive_ptr<SharedBlock> block;
  if (block_bytes > 0) block = c10::make_intrusive<SharedBlock>(allocator->allocate(block_bytes));
  uint64_t offset = 0;
  std::vector<c10::Storage> storages;
  storages.reserve(plan.storage_bytes.size());
  for (size_t i = 0; i < plan.storage_bytes.size(); ++i) {
    const uint64_t bytes = plan.storage_bytes[i];
    const bool is_donated = !donors.empty() && donors[i] != kNoArgument;
    c10::DataPtr memory;
    if (in_block(i)) {
      memory = part_of(block, offset, device);
      offset += align_up(bytes);
    } else if (is_donated) {
      memory = donations.take(PyList_GET_ITEM(arguments, donors[i]));
    } else {
      memory = allocator->allocate(bytes);
    }
    storages.emplace_back(c10::Storage::use_byte_size_t(), bytes, std::move(memory), allocator,
                          /*resizable=*/true);
    if (is_donated) donations.given_to(storages.back());
  }
  return storages;
}

PyObject* build_outputs(const OutputPlan& plan, const std::vector<c10::Storage>& storages,
                        PyObject* arguments) {
  const auto count = static_cast<Py_ssize_t>(plan.outputs.size());
  PyObject* result = plan.is_tuple ? PyTuple_New(count) : PyList_New(count);
  if (result == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Output& output = plan.outputs[i];
    PyObject* object = nullptr;
    switch (output.kind) {
      case OutputKind::kFresh:
        object = THPVariable_Wrap(make_tensor(storages[output.source], output, output.byte_offset));
        break;
      case OutputKind::kArgument:
        object = Py_NewRef(PyList_GET_ITEM(arguments, output.source));
        break;
      case OutputKind::kView:
        object = THPVariable_Wrap(make_view(output, arguments));
        break;
      case OutputKind::kRepeated:
        object = Py_NewRef(item(result, output.source));
        break;
      case OutputKind::kPersistent:
        object = Py_NewRef(plan.persistent[i]);
        break;
    }
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

}  // namespace pygraph
