#include "tensors/saved_blocks.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <map>
#include <utility>

#include "conversions.h"
#include "pygraph/alignment.h"
#include "pygraph/join_saved.h"
#include "torch_private/torch_cuda.h"
#include "without_python_lock.h"

namespace py = pybind11;

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
    PyObject* object = PyList_GET_ITEM(outputs, part.position);
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
    const c10::Storage& storage = unpack_tensor(PyList_GET_ITEM(outputs, part.position)).storage();
    return storage.use_count() == users[storage.unsafeGetStorageImpl()];
  });
}

// A new block with the contents of the parts.
c10::Storage copy_of(const Driver& driver, const std::vector<Part>& parts, uint64_t bytes,
                     PyObject* outputs, c10::Device device) {
  std::vector<const c10::DataPtr*> sources;
  sources.reserve(parts.size());
  for (const Part& part : parts) {
    sources.push_back(&unpack_tensor(PyList_GET_ITEM(outputs, part.position)).storage().data_ptr());
  }
  const WithoutPythonLock unlocked;  // the allocator may wait for the device
  c10::Allocator* allocator = c10::GetAllocator(c10::kCUDA);
  c10::Storage block(c10::Storage::use_byte_size_t(), static_cast<int64_t>(bytes),
                     allocator->allocate(bytes), allocator, /*resizable=*/true);
  const auto address = reinterpret_cast<uint64_t>(block.mutable_data());
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  const c10::Stream stream = guard.getStream(device);
  const CUstream handle = torch_cuda::current_stream(device.index());
  for (size_t i = 0; i < parts.size(); ++i) {
    guard.recordDataPtrOnStream(*sources[i], stream);  // it may be another stream's
    PYGRAPH_CHECK(driver, copy_on_device_async(address + parts[i].buffer->offset,
                                               reinterpret_cast<uint64_t>(sources[i]->get()),
                                               parts[i].buffer->bytes, handle));
  }
  return block;
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

void copy_into_blocks(const Driver& driver, const OutputPlan& plan, PyObject* outputs,
                      c10::Device device) {
  if (PyList_GET_SIZE(outputs) != static_cast<Py_ssize_t>(plan.outputs.size())) return;
  const c10::OptionalDeviceGuard guard(device);
  for (const auto& [block, parts] : joined_blocks(plan)) {
    if (!can_be_joined(parts, outputs)) continue;
    const c10::Storage storage = copy_of(driver, parts, plan.block_bytes[block], outputs, device);
    std::vector<py::object> tensors;
    for (const Part& part : parts) {
      const auto offset = static_cast<int64_t>(part.buffer->offset) + part.output->byte_offset;
      tensors.push_back(steal(
          THPVariable_Wrap(make_tensor(storage, part.output->dtype, part.output->sizes,
                                       part.output->strides, offset, part.output->conj_neg))));
    }
    for (size_t i = 0; i < parts.size(); ++i) {
      PyList_SetItem(outputs, parts[i].position, tensors[i].release().ptr());
    }
  }
}

}  // namespace pygraph::bindings
