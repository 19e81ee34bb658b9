// Asks for memory that will be read soon.
//
// Between two calls of a program others fill the CPU's caches. What a call reads for each tensor
// lies all over the heap, and each line of the cache takes up to 100 ns to come, one after the
// other, unless several are asked for together.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pygraph::bindings {

inline void prefetch(const void* address, size_t bytes) {
  constexpr uintptr_t kLine = 64;
  const auto first = reinterpret_cast<uintptr_t>(address);
  for (uintptr_t line = first & ~(kLine - 1); line < first + bytes; line += kLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(line));
  }
}

}  // namespace pygraph::bindings
