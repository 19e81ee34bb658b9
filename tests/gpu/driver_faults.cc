// Stands between PyGraph and the driver, and lets single calls fail. PyGraph is told to open this
// library as the driver (PYGRAPH_LIBCUDA); tests/gpu/faults.py builds it and talks to it.
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstring>

#include "pygraph/driver.h"

namespace pygraph {
namespace {

using abi::Result;

enum Index : int {
#define PYGRAPH_INDEX(member, symbol, version, ...) k_##member,
  PYGRAPH_DRIVER_FUNCTIONS(PYGRAPH_INDEX)
#undef PYGRAPH_INDEX
      kCount
};

struct Entry {
  const char* symbol = nullptr;
  std::atomic<void*> real = nullptr;
  std::atomic<long> calls = 0;
  std::atomic<long> calls_until_failure = 0;  // not above 0: none is to fail
  std::atomic<Result> result = 0;
  std::atomic<long> failures = 0;
};

std::array<Entry, kCount> g_entries = {{
#define PYGRAPH_NAME(member, symbol, version, ...) {symbol},
    PYGRAPH_DRIVER_FUNCTIONS(PYGRAPH_NAME)
#undef PYGRAPH_NAME
}};

template <Index I, typename... Args>
struct Wrapper {
  static Result call(Args... args) {
    Entry& entry = g_entries[I];
    entry.calls.fetch_add(1, std::memory_order_relaxed);
    if (entry.calls_until_failure.load(std::memory_order_relaxed) > 0 &&
        entry.calls_until_failure.fetch_sub(1) == 1) {
      entry.failures.fetch_add(1);
      return entry.result;
    }
    return reinterpret_cast<Result (*)(Args...)>(entry.real.load())(args...);
  }
};

struct Replacement {
  const char* symbol;
  void* wrapper;
};

const Replacement kReplacements[] = {
#define PYGRAPH_REPLACEMENT(member, symbol, version, ...) \
  {symbol, reinterpret_cast<void*>(&Wrapper<k_##member __VA_OPT__(, ) __VA_ARGS__>::call)},
    PYGRAPH_DRIVER_FUNCTIONS(PYGRAPH_REPLACEMENT)
#undef PYGRAPH_REPLACEMENT
};

}  // namespace
}  // namespace pygraph

using namespace pygraph;

#define PYGRAPH_EXPORT extern "C" __attribute__((visibility("default")))

PYGRAPH_EXPORT Result cuGetProcAddress_v2(const char* symbol, void** function, int version,
                                          uint64_t flags, int* status) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  static auto* get =
      driver == nullptr
          ? nullptr
          : reinterpret_cast<pygraph::GetProcAddress>(dlsym(driver, "cuGetProcAddress_v2"));
  if (get == nullptr) return pygraph::abi::kNotInitialized;
  const Result result = get(symbol, function, version, flags, status);
  if (result != pygraph::abi::kSuccess || *function == nullptr) return result;
  for (int i = 0; i < kCount; ++i) {
    if (std::strcmp(kReplacements[i].symbol, symbol) != 0) continue;
    g_entries[i].real = *function;
    *function = kReplacements[i].wrapper;
  }
  return result;
}

PYGRAPH_EXPORT int pygraph_faults_count() {
  return kCount;
}
PYGRAPH_EXPORT const char* pygraph_faults_name(int index) {
  return g_entries[index].symbol;
}
PYGRAPH_EXPORT long pygraph_faults_calls(int index) {
  return g_entries[index].calls;
}
PYGRAPH_EXPORT long pygraph_faults_failures(int index) {
  return g_entries[index].failures;
}
// The `call`th call from now on (1: the next) returns `result` instead of being made; 0: none does.
PYGRAPH_EXPORT void pygraph_faults_inject(int index, long call, int result) {
  g_entries[index].result = result;
  g_entries[index].calls_until_failure = call;
}
