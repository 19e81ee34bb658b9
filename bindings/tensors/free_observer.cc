#include "tensors/free_observer.h"

#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "tensors/outputs.h"

namespace py = pybind11;

namespace pygraph::bindings {
namespace {

bool is_python_ending() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

at::Tensor bytes_of(const c10::Storage& storage) {
  const auto bytes = static_cast<int64_t>(storage.nbytes());
  return make_tensor(storage, caffe2::TypeMeta::Make<uint8_t>(), {bytes}, {1}, 0, {});
}

}  // namespace

at::Tensor memory_of(const at::Tensor& tensor) {
  return bytes_of(tensor.storage());
}

// The context of a storage's memory meanwhile.
struct FreeObserver::Memory {
  c10::DataPtr owned;  // the allocator's
  size_t bytes = 0;
  size_t index = 0;
  std::weak_ptr<py::function> observe;  // expires when the observer ends
};

FreeObserver::FreeObserver(const std::vector<at::Tensor>& tensors, py::function observe)
    : observe_(std::make_shared<py::function>(std::move(observe))) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    c10::StorageImpl* storage = tensors[i].storage().unsafeGetStorageImpl();
    auto memory = std::make_unique<Memory>(Memory{{}, storage->nbytes(), i, observe_});
    void* address = storage->mutable_data();
    c10::DataPtr watched(address, memory.get(), &FreeObserver::free, storage->device());
    Memory* context = memory.release();  // the storage's from here on
    context->owned = storage->set_data_ptr(std::move(watched));
    storages_.push_back(tensors[i].storage().getWeakStorageImpl());
  }
}

FreeObserver::~FreeObserver() {
  put_back(false);
}

void FreeObserver::end() {
  put_back(true);
}

void FreeObserver::put_back(bool reports) {
  for (const auto& weak : std::exchange(storages_, {})) {
    const c10::Storage storage(weak.lock());
    if (!storage || storage.data_ptr().get_deleter() != &FreeObserver::free) continue;
    auto* memory = static_cast<Memory*>(storage.data_ptr().get_context());
    if (reports) report(*memory, bytes_of(storage));
    memory->observe.reset();
    const c10::DataPtr watched =
        storage.unsafeGetStorageImpl()->set_data_ptr(std::exchange(memory->owned, {}));
  }
  observe_.reset();
}

void FreeObserver::free(void* memory) {
  const std::unique_ptr<Memory> owner(static_cast<Memory*>(memory));
  if (owner->owned.get() == nullptr) return;  // put back
  if (is_python_ending()) return;  // the result is not needed, and Python's lock cannot be taken
  const py::gil_scoped_acquire lock;
  const c10::Storage borrowed(c10::Storage::use_byte_size_t(), owner->bytes,
                              c10::DataPtr(owner->owned.get(), owner->owned.device()),
                              /*allocator=*/nullptr, /*resizable=*/false);
  report(*owner, bytes_of(borrowed));
}

void FreeObserver::report(const Memory& memory, at::Tensor bytes) {
  const std::shared_ptr<py::function> observe = memory.observe.lock();
  if (observe == nullptr) return;
  const py::error_scope kept;  // memory is freed while errors are raised, too
  try {
    // The Python object is the only one that refers to the tensor: PyTorch asserts so when it ends.
    (*observe)(memory.index, py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(bytes))));
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("an observer of a tensor's memory");
  }
}

}  // namespace pygraph::bindings
