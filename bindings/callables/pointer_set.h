// A set of addresses in one piece of memory: an element costs a few nanoseconds, not an allocation.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pygraph::bindings {

class PointerSet {
 public:
  // For at most `most` elements.
  explicit PointerSet(size_t most = 0) : slots_(std::bit_ceil(2 * most + 1), nullptr) {}

  // False if it was there. Not null.
  bool insert(const void* pointer) {
    const void*& found = slots_[slot_of(pointer)];
    const bool is_new = found == nullptr;
    found = pointer;
    return is_new;
  }
  bool contains(const void* pointer) const { return slots_[slot_of(pointer)] != nullptr; }

 private:
  // Where it is, or where it would be.
  size_t slot_of(const void* pointer) const {
    const size_t mask = slots_.size() - 1;
    size_t i = (reinterpret_cast<uintptr_t>(pointer) * 0x9E3779B97F4A7C15ULL >> 32) & mask;
    while (slots_[i] != nullptr && slots_[i] != pointer) i = (i + 1) & mask;
    return i;
  }

  std::vector<const void*> slots_;  // a power of two of them, at most half of them taken
};

}  // namespace pygraph::bindings
