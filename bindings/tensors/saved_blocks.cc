#include "tensors/saved_blocks.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <map>

#include "conversions.h"
#include "pygraph/alignment.h"
#include "pygraph/join_saved.h"
#include "torch_private/torch_cuda.h"

namespace pygraph::bindings {
namespace {

// A tensor of an uncaptured call that belongs in a block.
struct Part {
  Py_ssize_t position;
  const Output* output;
  const OutputBuffer* buffer;
};

// The parts of each block of saved tensors that were joined.
std::map<uint32_t, std::vector<Part>> joined_blocks(const OutputPlan& plan) {
  std::vector<uint32_t> buffers_in(plan.block_bytes.size(), 0);
  for (const OutputBuffer& buffer : plan.buffers) ++buffers_in[buffer.block];
  std::map<uint32_t, std::vector<Part>> blocks;
  for (size_t i = 0; i < plan.outputs.size(); ++i) {
    const Output& output = plan.outputs[i];
    if (output.kind != OutputKind::kFresh) continue;
    const OutputBuffer& buffer = plan.buffers[output.source];
    const uint64_t bytes = plan.block_bytes[buffer.block];
    const bool is_donated = plan.block_donors[buffer.block] != OutputPlacement::kNone;
    if (buffers_in[buffer.block] < 2 || bytes < kSmallestDonation || is_donated) continue;
    blocks[buffer.block].push_back({static_cast<Py_ssize_t>(i), &output, &buffer});
  }
  return blocks;
}

// Whether the call's tensors are those of the recording, each buffer in a storage of its own that
// nothing else uses.
bool can_be_joined(const std::vector<Part>& parts, PyObject* outputs) {
  std::map<const OutputBuffer*, const c10::StorageImpl*> storages;
  std::map<const c10::StorageImpl*, size_t> users;
  for (const Part& part : parts) {
    PyObject* object = item(outputs, part.position);
    if (!THPVariable_CheckExact(object)) return false;
    const at::Tensor& tensor = unpack_tensor(object);
    if (!tensor.is_cuda() || tensor.layout() != at::kStrided || tensor.requires_grad())
      return false;
    const Output& output = *part.output;
    const int64_t offset = tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
    const bool is_same = tensor.sizes() == output.sizes && tensor.strides() == output.strides &&
                         tensor.dtype() == output.dtype && offset == output.byte_offset &&
                         conj_neg_bits_of(tensor) == output.conj_neg &&
                         tensor.storage().nbytes() == part.buffer->bytes;
    if (!is_same) return false;
    const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    if (storages.emplace(part.buffer, storage).first->second != storage) return false;
    ++users[storage];
  }
  if (users.size() != storages.size()) return false;
  return std::ranges::all_of(parts, [&](const Part& part) {
    const c10::Storage& storage = unpack_tensor(item(outputs, part.position)).storage();
    return storage.use_count() == users[storage.unsafeGetStorageImpl()];
  });
}

// A new block with the contents of the parts.
c10::Storage join(const Driver& driver, const std::vector<Part>& parts, uint64_t bytes,
                  PyObject* outputs, c10::Device device) {
  c10::Allocator* allocator = c10::GetAllocator(c10::kCUDA);
  c10::Storage block(c10::Storage::use_byte_size_t(), static_cast<int64_t>(bytes),
                     allocator->allocate(bytes), allocator, /*resizable=*/true);
  const auto address = reinterpret_cast<uint64_t>(block.mutable_data());
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  const c10::Stream stream = guard.getStream(device);
  const CUstream handle = torch_cuda::current_stream(device.index());
  for (const Part& part : parts) {
    const c10::Storage& storage = unpack_tensor(item(outputs, part.position)).storage();
    guard.recordDataPtrOnStream(storage.data_ptr(), stream);  // it may be another stream's
    const auto source = reinterpret_cast<uint64_t>(storage.data());
    PYGRAPH_CHECK(driver, copy_on_device_async(address + part.buffer->offset, source,
                                               part.buffer->bytes, handle));
  }
  return block;
}

PyObject* copy_of(PyObject* outputs) {
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(outputs);
  if (!PyTuple_Check(outputs)) return PyList_GetSlice(outputs, 0, count);
  PyObject* result = PyTuple_New(count);
  for (Py_ssize_t i = 0; result != nullptr && i < count; ++i) {
    PyTuple_SET_ITEM(result, i, Py_NewRef(PyTuple_GET_ITEM(outputs, i)));
  }
  return result;
}

// Replaces an item of a list or tuple that nobody else has. Takes over the reference.
void replace(PyObject* sequence, Py_ssize_t i, PyObject* object) {
  PyObject* old = item(sequence, i);
  if (PyTuple_Check(sequence)) {
    PyTuple_SET_ITEM(sequence, i, object);
  } else {
    PyList_SET_ITEM(sequence, i, object);
  }
  Py_DECREF(old);
}

}  // namespace

void join_saved_tensors(OutputPlan& plan, const std::vector<uint32_t>& positions,
                        const std::vector<uint64_t>& gradients) {
  const std::vector<uint8_t> may_share = used_only_at(plan, positions);
  std::vector<OutputBuffer*> buffers;
  std::vector<uint64_t> bytes;
  for (size_t i = 0; i < plan.buffers.size(); ++i) {
    if (may_share[i] == 0 || plan.buffers[i].bytes < kSmallestDonation) continue;
    buffers.push_back(&plan.buffers[i]);
    bytes.push_back(plan.buffers[i].bytes);
  }
  for (const std::vector<uint32_t>& group : join_saved(bytes, gradients)) {
    const uint32_t block = buffers[group.front()]->block;
    uint64_t end = 0;
    for (const uint32_t member : group) {
      OutputBuffer& buffer = *buffers[member];
      buffer.block = block;
      buffer.offset = align_up(end);
      end = buffer.offset + buffer.bytes;
    }
    plan.block_bytes[block] = end;
  }
}

PyObject* with_joined_tensors(const Driver& driver, const OutputPlan& plan, PyObject* outputs,
                              c10::Device device) {
  const bool is_list = PyTuple_Check(outputs) || PyList_Check(outputs);
  const auto count = static_cast<Py_ssize_t>(plan.outputs.size());
  if (!is_list || PySequence_Fast_GET_SIZE(outputs) != count) return Py_NewRef(outputs);
  const c10::OptionalDeviceGuard guard(device);
  std::map<uint32_t, c10::Storage> storages;
  const auto blocks = joined_blocks(plan);
  for (const auto& [block, parts] : blocks) {
    if (!can_be_joined(parts, outputs)) continue;
    storages[block] = join(driver, parts, plan.block_bytes[block], outputs, device);
  }
  if (storages.empty()) return Py_NewRef(outputs);
  PyObject* result = copy_of(outputs);
  if (result == nullptr) return nullptr;
  for (const auto& [block, storage] : storages) {
    for (const Part& part : blocks.at(block)) {
      const auto offset = static_cast<int64_t>(part.buffer->offset) + part.output->byte_offset;
      PyObject* tensor =
          THPVariable_Wrap(make_tensor(storage, part.output->dtype, part.output->sizes,
                                       part.output->strides, offset, part.output->conj_neg));
      if (tensor == nullptr) {
        Py_DECREF(result);
        return nullptr;
      }
      replace(result, part.position, tensor);
    }
  }
  return result;
}

}  // namespace pygraph::bindings
