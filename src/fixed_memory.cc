#include "pygraph/fixed_memory.h"

#include <algorithm>
#include <numeric>

#include "pygraph/handles.h"

namespace pygraph {

FixedMemory::~FixedMemory() {
  const RelaxedCaptureMode relaxed(driver_);
  for (const Range& piece : pieces_) driver_.memory_free(piece.address);
}

uint64_t FixedMemory::allocate(uint64_t size) {
  if (next_ < pieces_.size() && pieces_[next_].size == size) return pieces_[next_++].address;
  // The first recording, or another one that asks for something else. Its addresses will differ,
  // which the linker sees.
  const RelaxedCaptureMode relaxed(driver_);
  abi::DevicePointer address = 0;
  PYGRAPH_CHECK(driver_, memory_allocate(&address, size));
  const auto here = pieces_.begin() + static_cast<ptrdiff_t>(next_++);
  pieces_.insert(here, {address, size});
  return address;
}

bool FixedMemory::contains(uint64_t address) const {
  return std::ranges::any_of(pieces_, [&](const Range& piece) { return piece.contains(address); });
}

uint64_t FixedMemory::bytes() const {
  return std::accumulate(pieces_.begin(), pieces_.end(), uint64_t{0},
                         [](uint64_t sum, const Range& piece) { return sum + piece.size; });
}

void FixedMemory::fill(unsigned char value, CUstream stream) const {
  for (const Range& piece : pieces_) {
    PYGRAPH_CHECK(driver_, memset_d8_async(piece.address, value, piece.size, stream));
  }
}

}  // namespace pygraph
