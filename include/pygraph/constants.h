// Constant addresses, which are equal in both recordings, and the owners of their memory.
//
// A replay uses them unchanged, so the memory must stay valid. Either the graph holds it, or the
// driver numbers the allocation, and the number is compared before each launch (memory of a module,
// of a library, of an operator that calls cudaMalloc): the driver never uses a number again. An
// address of any other memory is refused. PyTorch's allocator, for example, reuses memory without
// the driver's knowledge.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "pygraph/recording.h"

namespace pygraph {

// The memory that existed around a recording.
struct Surroundings {
  // Memory that lives as long as the graph: on the device, or pinned memory of the host.
  std::vector<Range> held = {};
  // Stand-in memory of recordings that an operator still holds.
  std::vector<Range> kept_stand_ins = {};
  // Memory in which libraries work on other streams than the capture's. It is no argument of
  // theirs, and may be freed.
  std::vector<Range> workspaces = {};
  // Memory that an allocator may reuse. Called only if a constant is not held.
  std::function<std::vector<Range>()> cached = {};
};

// Memory that the graph uses and does not own. The driver gives each allocation a number, and uses
// no number twice.
struct ForeignMemory {
  uint64_t address = 0;
  uint64_t number = 0;
  std::string user = {};  // the node that uses it, for messages
};

// Foreign memory that a graph uses has been freed. Nothing was launched.
class MemoryGone : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws MemoryGone if one of them has been freed.
void check_foreign_memory(const Driver& driver, const std::vector<ForeignMemory>& memory);

// Finds the owner of a constant's memory. For one link(); asks the driver once per address.
class ConstantOwners {
 public:
  enum class Owner : uint8_t {
    kNone,     // not an address that the driver knows
    kHeld,     // lives as long as the graph
    kForeign,  // numbered by the driver
    kHost,     // memory of the host, not held
    kCached,   // of an allocator that may reuse it
    kStandIn,  // of a recording, and held by an operator
  };
  struct Answer {
    Owner owner = Owner::kNone;
    ForeignMemory memory = {};  // for kForeign; the caller fills in `user`
  };
  ConstantOwners(const Driver& driver, const Surroundings& surroundings)
      : driver_(driver), surroundings_(surroundings) {}
  Answer of(uint64_t address);

 private:
  Answer ask(uint64_t address);
  bool is_cached(uint64_t address);

  const Driver& driver_;
  const Surroundings& surroundings_;
  std::optional<std::vector<Range>> cached_;
  std::unordered_map<uint64_t, Answer> answers_;
};

}  // namespace pygraph
