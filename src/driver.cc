#include "pygraph/driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>

namespace pygraph {
namespace {

constexpr int kMinimumVersion = 12040;
constexpr uint64_t kLegacyStream = 1;  // CU_GET_PROC_ADDRESS_LEGACY_STREAM: streams are explicit

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

GetProcAddress open_driver() {
  // Tests may put a library of their own in front of the driver.
  const char* other = std::getenv("PYGRAPH_LIBCUDA");
  const std::string name = other != nullptr ? other : "libcuda.so.1";
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw DriverError("no CUDA driver: " + name + " cannot be loaded", abi::kNotInitialized);
  }
  auto* get = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  if (get == nullptr) {
    throw DriverError("the CUDA driver is older than 12.0; PyGraph needs 12.4", abi::kNotSupported);
  }
  return get;
}

void* find_function(GetProcAddress get, const char* symbol, int version) {
  void* function = nullptr;
  int status = 0;
  // The driver answers "success" with a null pointer for names it does not know.
  const abi::Result result = get(symbol, &function, version, kLegacyStream, &status);
  if (result == abi::kStubLibrary) {
    throw DriverError("libcuda.so.1 is the toolkit's stub, not a driver", result);
  }
  if (result != abi::kSuccess || function == nullptr) {
    throw DriverError(std::string("the CUDA driver has no ") + symbol + " of version " +
                          version_text(version) + "; PyGraph needs driver 12.4",
                      result == abi::kSuccess ? abi::kNotFound : result);
  }
  return function;
}

}  // namespace

Driver load_driver(GetProcAddress get) {
  Driver driver;
  driver.driver_get_version = reinterpret_cast<decltype(driver.driver_get_version)>(
      find_function(get, "cuDriverGetVersion", 2020));
  int version = 0;
  driver.driver_get_version(&version);
  if (version < kMinimumVersion) {
    throw DriverError("the CUDA driver supports CUDA " + version_text(version) +
                          "; PyGraph needs 12.4 (cuFuncGetParamInfo)",
                      abi::kNotSupported);
  }
#define PYGRAPH_LOAD(member, symbol, abi_version, ...) \
  driver.member =                                      \
      reinterpret_cast<decltype(driver.member)>(find_function(get, symbol, abi_version));
  PYGRAPH_DRIVER_FUNCTIONS(PYGRAPH_LOAD)
#undef PYGRAPH_LOAD
  return driver;
}

const Driver& cuda_driver() {
  // An exception leaves it unset: the next call tries again.
  static const Driver driver = load_driver(open_driver());
  return driver;
}

bool DriverError::sticky() const {
  // CONTAINED, ILLEGAL_ADDRESS, LAUNCH_TIMEOUT, ASSERT, HARDWARE_STACK..LAUNCH_FAILED, and the
  // memory errors that leave the context unusable.
  static constexpr std::array kSticky = {214, 220, 226, 700, 702, 710, 714,
                                         715, 716, 717, 718, 719, 721, 911};
  return std::find(kSticky.begin(), kSticky.end(), code_) != kSticky.end();
}

void check_result(const Driver& driver, abi::Result result, const char* call) {
  if (result == abi::kSuccess) return;
  const char* name = nullptr;
  driver.get_error_name(result, &name);
  throw DriverError(std::string(call) + " failed: " + (name != nullptr ? name : "error") + " (" +
                        std::to_string(result) + ")",
                    result);
}

}  // namespace pygraph
