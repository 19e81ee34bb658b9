#include "torch_private/free_memory_callback.h"

#include <c10/util/Registry.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "torch_private/torch_cuda.h"

namespace c10 {

// As in c10/cuda/CUDACachingAllocator.h, which needs a CUDA toolkit.
class FreeMemoryCallback {
 public:
  virtual ~FreeMemoryCallback() = default;
  virtual bool Execute() = 0;
};

}  // namespace c10

namespace pygraph::bindings::torch_cuda {
namespace {

using Callbacks = c10::Registry<std::string, std::unique_ptr<c10::FreeMemoryCallback>>;

class Callback : public c10::FreeMemoryCallback {
 public:
  explicit Callback(FreeMemory function) : function_(function) {}
  bool Execute() override { return function_(); }

 private:
  FreeMemory function_;
};

bool add(FreeMemory function) {
  using Find = Callbacks* (*)();
  Find find = nullptr;
  try {
    find = reinterpret_cast<Find>(
        find_function("_ZN3c1031FreeCudaMemoryCallbacksRegistryB5cxx11Ev"));  // of libc10_cuda
  } catch (const std::runtime_error&) {  // a PyTorch without CUDA
  }
  if (find == nullptr) return false;
  const std::string name = "pygraph";
  if (find()->Has(name)) return false;  // another copy of the extension is loaded
  find()->Register(name, [function] { return std::make_unique<Callback>(function); });
  return true;
}

}  // namespace

bool free_where_memory_is_short(FreeMemory function) {
  static const bool is_possible = add(function);
  return is_possible;
}

}  // namespace pygraph::bindings::torch_cuda
