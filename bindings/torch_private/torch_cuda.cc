#include "torch_private/torch_cuda.h"

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>

#include "pygraph/driver.h"

namespace pygraph::bindings::torch_cuda {
namespace {

// From AOTInductor's C interface (torch/csrc/inductor/aoti_torch/c/shim.h): stable, no C++ types.
using GetStream = int32_t (*)(int32_t device, void** stream);

GetStream find_get_stream() {
  auto* function = reinterpret_cast<GetStream>(find_function("aoti_torch_get_current_cuda_stream"));
  if (function == nullptr)
    throw std::runtime_error("this PyTorch does not tell its current stream");
  return function;
}

}  // namespace

void* find_function(const char* name) {
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) throw std::runtime_error("this PyTorch is built without CUDA");
  return dlsym(library, name);
}

CUstream current_stream(int device) {
  static const GetStream get = find_get_stream();
  void* stream = nullptr;
  if (get(device, &stream) != 0) throw std::runtime_error("cannot get the current CUDA stream");
  return static_cast<CUstream>(stream);
}

bool is_capturing(int device) {
  int status = 0;
  return cuda_driver().stream_is_capturing(current_stream(device), &status) != abi::kSuccess ||
         status != abi::kCaptureStatusNone;
}

}  // namespace pygraph::bindings::torch_cuda
