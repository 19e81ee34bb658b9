#include "donation.h"

#include <c10/core/Allocator.h>
#include <torch/csrc/autograd/python_variable.h>

#include "arguments.h"

namespace pygraph {

bool is_given_away(PyObject* object, Py_ssize_t holders, uint64_t size) {
  if (!THPVariable_Check(object) || Py_REFCNT(object) != holders) return false;
  const at::Tensor& tensor = unpack_tensor(object);
  if (!tensor.is_cuda() || !tensor.has_storage() || tensor.use_count() != 1 ||
      tensor.storage().use_count() != 1 || tensor.storage_offset() != 0 ||
      tensor.storage().nbytes() < size) {
    return false;
  }
  // Tensor.record_stream works on blocks that come from PyTorch's allocator, and only those.
  static const c10::DeleterFnPtr deleter = c10::GetAllocator(c10::kCUDA)->raw_deleter();
  return deleter != nullptr && tensor.storage().data_ptr().get_deleter() == deleter;
}

std::vector<uint32_t> given_away(PyObject* arguments) {
  std::vector<uint32_t> positions;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(arguments); ++i) {
    if (is_given_away(PyList_GET_ITEM(arguments, i), 1, 1)) {
      positions.push_back(static_cast<uint32_t>(i));
    }
  }
  return positions;
}

c10::DataPtr Donations::take(PyObject* argument) {
  const c10::Storage& storage = unpack_tensor(argument).storage();
  moves_.push_back({storage, {}});
  return storage.unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, storage.device()));
}

void Donations::given_to(const c10::Storage& output) {
  moves_.back().to = output;
}

Donations::~Donations() {
  for (Move& move : moves_) {
    if (!move.to) continue;
    c10::StorageImpl* output = move.to.unsafeGetStorageImpl();
    move.from.unsafeGetStorageImpl()->set_data_ptr_noswap(
        output->set_data_ptr(c10::DataPtr(nullptr, move.to.device())));
  }
}

}  // namespace pygraph
