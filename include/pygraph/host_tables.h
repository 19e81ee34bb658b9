// Tables that an operator copies from the host.
//
// Some operators of a framework compute a small table on the host, from sizes alone, in pinned
// memory of their own, and copy it to the device. The operator frees that memory, so replays cannot
// copy from there. The graph's node copies the same bytes from device memory instead, which never
// changes:
//
//     recorded   pinned memory of the operator's --> the operator's memory on the device
//     used       TableMemory, on the device      --> the same
//
// The copy remains a node, because its destination lies elsewhere in each launch. It becomes a copy
// within the device before the graph is instantiated, because the driver does not allow an
// executable graph to change the kind of a copy.
//
// When can the bytes be read? Until the operator ends it may write them, later its memory may be
// used for something else, and a capture copies nothing. So the recorder, which knows the operators
// to trust, reads them during the capture, when the operator has just ended
// (bindings/record/table_log.h).
#pragma once

#include <cstddef>
#include <deque>
#include <mutex>
#include <span>
#include <vector>

#include "pygraph/recording.h"

namespace pygraph {

// Memory of the current device that holds tables, one piece for each content. It is never freed,
// because a launch on any stream may still read it. There are as many tables as different lists of
// sizes. Thread-safe.
class TableMemory {
 public:
  explicit TableMemory(const Driver& driver) : driver_(driver) {}

  // The address of device memory with these bytes, valid on all streams. Throws DriverError.
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

// The bytes that the copies among the top-level nodes at positions [first, last) of a graph would
// now read from pinned memory. These copies have no entry: from pageable memory, which may be gone;
// of more than one row; to the host; of more than 1 MiB. The capture may still be in progress.
// Throws DriverError.
std::vector<HostTable> read_host_tables(const Driver& driver, CUgraph graph, uint32_t first,
                                        uint32_t last);

// Changes the copies that read equal bytes in both recordings so that they read them from `memory`:
// in both recordings' images, and in the second recording's graph. Returns the memory that they
// read from now on, which must be in Surroundings::held for link(). Copies of other bytes are left
// to match_recordings() and scan_relocations(), which refuse them. To be called once. Throws
// DriverError.
std::vector<Range> use_table_memory(const Driver& driver, Recording& first, Recording& second,
                                    TableMemory& memory);

}  // namespace pygraph
