// Device memory of one graph whose addresses stay what they are: for computations that hide an
// address where no relocation finds it, in device memory for example.
//
// All that such a computation touches, copies of its inputs included, lies here in both recordings,
// at the same addresses, so these are constants to the linker. Only the copies into and out of this
// memory, which are nodes of the graph, are relocated.
#pragma once

#include <cstdint>
#include <vector>

#include "pygraph/recording.h"

namespace pygraph {

class FixedMemory {
 public:
  explicit FixedMemory(const Driver& driver) : driver_(driver) {}
  // Waits for the device.
  ~FixedMemory();
  FixedMemory(const FixedMemory&) = delete;
  FixedMemory& operator=(const FixedMemory&) = delete;

  // The next allocation of a recording, real memory. Recordings that make the same requests, in
  // the same order, get the same addresses. Allowed while capturing. Throws DriverError.
  uint64_t allocate(uint64_t size);
  // The next recording begins.
  void rewind() { next_ = 0; }

  const std::vector<Range>& pieces() const { return pieces_; }
  bool contains(uint64_t address) const;
  uint64_t bytes() const;
  // Enqueues to fill all of it. Throws DriverError.
  void fill(unsigned char value, CUstream stream) const;

 private:
  const Driver& driver_;
  std::vector<Range> pieces_;  // in the order of the first requests
  size_t next_ = 0;            // piece, in the current recording
};

}  // namespace pygraph
