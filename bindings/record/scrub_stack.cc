#include "record/scrub_stack.h"

#include <pthread.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace pygraph::bindings {
namespace {

constexpr size_t kScrubbedStack = size_t{512} << 10;
// Left alone at the end of a thread's stack: for the loop itself, and pages that must not be
// touched.
constexpr size_t kStackReserve = size_t{64} << 10;

// Bytes of this thread's stack below the caller's frame; 0 where the system does not say.
size_t stack_left() {
  pthread_attr_t attributes;
  if (pthread_getattr_np(pthread_self(), &attributes) != 0) return 0;
  void* lowest = nullptr;
  size_t size = 0;
  const int status = pthread_attr_getstack(&attributes, &lowest, &size);
  pthread_attr_destroy(&attributes);
  const auto here = reinterpret_cast<uint64_t>(__builtin_frame_address(0));
  const auto end = reinterpret_cast<uint64_t>(lowest);
  return status == 0 && here > end ? here - end : 0;
}

}  // namespace

void scrub_stack() {
  const size_t left = stack_left();
  if (left <= kStackReserve) return;
  const size_t bytes = std::min(kScrubbedStack, left - kStackReserve);
  auto* garbage = static_cast<volatile uint64_t*>(__builtin_alloca(bytes));
  for (size_t i = bytes / sizeof(uint64_t); i-- > 0;) garbage[i] = 0;  // downwards, as it grows
}

}  // namespace pygraph::bindings
