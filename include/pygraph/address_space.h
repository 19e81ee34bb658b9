// Addresses without memory: stand-ins for inputs, outputs and internal memory while recording.
//
// Nothing executes during a capture, so its addresses need no memory of their own. They must be
// mapped, because copy nodes refuse unmapped addresses. So a range of virtual addresses is
// reserved, and every 2 MiB of it is mapped to one of two physical pages, one for floating-point
// tensors and one for everything else. A recording uses 4 MiB of device memory. A mapping takes the
// driver some 80 us, so what comes after the first 64 MiB of either kind is mapped to a page of 8
// MiB, and what comes after 4 GiB to one of 32 MiB: recording a graph that works on 30 GB of
// floating-point tensors uses 44 MiB.
//
// The pages serve a second purpose. While a new graph is verified they are filled with poison: a
// kernel that uses an address which PyGraph failed to relocate then reads poison, which changes the
// outputs, or writes to the page, which untouched() detects. The pages stay mapped, because a GPU
// fault would end the process. Floating-point stand-ins get a page of NaN; the others get small
// integers, so that a kernel that uses them as an index stays near its buffer.
#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <vector>

#include "pygraph/recording.h"

namespace pygraph {

class AddressSpace {
 public:
  enum class Content : uint8_t { kFloating, kOther };

  // Irregular gaps of 512 bytes to 64 KiB between allocations, and an irregular start. The sequence
  // is the same in each recording with this value. Differences of addresses are distinct, and
  // differ from round numbers.
  static constexpr uint64_t kIrregularGaps = 0;
  // The gaps of a computation's two recordings.
  static constexpr std::array<uint64_t, 2> kGaps = {512, kIrregularGaps};

  // Reserves `capacity` bytes of addresses on `device`, which must be current. `gap` bytes (a
  // multiple of 512) are left free after each allocation; two recordings use different gaps, so
  // that distances between buffers differ as well as addresses. Throws DriverError.
  AddressSpace(const Driver& driver, int device, uint64_t capacity, uint64_t gap);
  ~AddressSpace();
  AddressSpace(const AddressSpace&) = delete;
  AddressSpace& operator=(const AddressSpace&) = delete;

  // An unused address that equals `low_bits` (below 512) modulo 512. Allowed while capturing.
  // Throws DriverError with kOutOfMemory when the capacity is used up.
  uint64_t allocate(uint64_t size, uint64_t low_bits, Content content);

  // Maps these addresses to memory of their own, cleared, because an operator keeps using them
  // after the recording. If there is no memory, the shared page stays. Afterwards the space must
  // neither be destroyed nor poisoned.
  void retain(const std::vector<Range>& pieces) noexcept;

  Range range() const { return {base_, capacity_}; }
  uint64_t mapped_bytes() const;

  // Fills the pages that have not been filled so far, or that untouched() has found written since;
  // waits for the device.
  void poison();
  // Whether the pages still hold the poison; waits for the device. Sees all writes since they were
  // filled.
  bool untouched();

 private:
  struct Page {
    uint64_t size = 0;
    abi::MemoryHandle handle = 0;
    uint64_t address = 0;    // the first that is mapped to it; 0 if none is
    bool is_filled = false;  // with poison, and not found written since
  };
  struct Region {  // in one half of the range, mapped to its pages over and over
    uint64_t begin;
    uint64_t end;
    uint64_t next;            // first unused address
    uint64_t mapped;          // end of what is mapped
    std::vector<Page> pages;  // the smallest first; larger ones are made when they are needed
    uint64_t grows_at;        // when so much is mapped, the next larger page is asked for
    std::vector<Range> mappings;
    uint64_t poison;  // the 8-byte pattern
  };

  void release() noexcept;
  void map_until(Region& region, uint64_t end);
  Page& next_page(Region& region);
  bool replace_mapping(const Page& small, const Range& mapping, const Range& kept) noexcept;

  const Driver& driver_;
  int device_;
  uint64_t capacity_;
  uint64_t gap_;
  std::mt19937 random_;  // for irregular gaps
  uint64_t base_ = 0;
  std::vector<Region> regions_;  // by Content
};

}  // namespace pygraph
