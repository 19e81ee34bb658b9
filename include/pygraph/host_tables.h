// Tables that an operator copies from the host.
//
// Some operators of a framework compute a small table on the host, from nothing but sizes, in
// pinned memory of their own, and copy it to the device. The operator gives that memory back, so a
// graph that is used again cannot copy from there. Its node copies the same bytes from memory of
// the device instead, which never changes:
//
//     recorded   pinned memory of the operator's --> the operator's memory on the device
//     used       TableMemory, on the device      --> the same
//
// The copy stays a node of its own, because the operator's memory is taken anew in each launch. It
// is a copy within the device from before the graph is instantiated: the driver lets no executable
// graph turn one kind of copy into another.
//
// When are the bytes there? A capture copies nothing. Until the operator ends it may write them;
// later its memory may be somebody else's. So they are read when it has just ended, within the
// capture, by whoever knows which operators to trust (bindings/record/table_log.h).
#pragma once

#include <cstddef>
#include <deque>
#include <mutex>
#include <span>
#include <vector>

#include "pygraph/recording.h"

namespace pygraph {

// Memory of the current device that holds tables, one piece for each content. It is never freed: a
// launch on any stream may still read it, and there are as many as lists of sizes. Thread-safe.
class TableMemory {
 public:
  explicit TableMemory(const Driver& driver) : driver_(driver) {}

  // The address of memory with these bytes, which are there for all streams. Throws DriverError.
  uint64_t keep(std::span<const std::byte> bytes);

 private:
  struct Kept {
    std::vector<std::byte> bytes;
    uint64_t address = 0;
  };

  const Driver& driver_;
  std::mutex mutex_;
  std::deque<Kept> kept_;
};

// What the copies among the top-level nodes at positions [first, last) of a graph would now read
// from pinned memory. Others have no entry: copies from pageable memory, which may be gone, of more
// than one row, to the host, and of more than 1 MiB. The graph may still be captured. Throws
// DriverError.
std::vector<HostTable> read_host_tables(const Driver& driver, CUgraph graph, uint32_t first,
                                        uint32_t last);

// Lets the copies that read equal bytes in both recordings read them from `memory`: in both
// recordings' images, and in the graph of the second. Returns what they read then, which is to be
// among what the graph holds in link(). Copies of other bytes are left to match_recordings() and
// scan_relocations(), which refuse them. To be called once. Throws DriverError.
std::vector<Range> use_table_memory(const Driver& driver, Recording& first, Recording& second,
                                    TableMemory& memory);

}  // namespace pygraph
