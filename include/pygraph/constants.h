// Addresses that are equal in both recordings, and whose memory they are.
//
// A replay uses them as they are, so somebody must answer for the memory behind each one: the graph
// holds it; or the driver does not give it to anybody else without giving it another number, which
// is compared before each launch (memory of a module, of a library, of an operator that calls
// cudaMalloc). An address of any other memory is refused: PyTorch's allocator, for one, gives
// memory to others, and the driver sees nothing of that.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "pygraph/recording.h"

namespace pygraph {

// What a recording's surroundings are.
struct Surroundings {
  // Memory that is there for as long as the graph: on the device, or pinned memory of the host.
  std::vector<Range> held = {};
  // Stand-in memory of recordings that somebody still holds.
  std::vector<Range> kept_stand_ins = {};
  // What an allocator owns that gives it to others: asked for only if a constant is not held.
  std::function<std::vector<Range>()> cached = {};
};

// Memory of somebody else's that a graph uses. The driver numbers allocations, once and for all.
struct ForeignMemory {
  uint64_t address = 0;
  uint64_t number = 0;
  std::string user = {};  // which node uses it, in words
};

// A graph uses memory of somebody else's that is gone. Nothing was launched.
class MemoryGone : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws MemoryGone.
void check_foreign_memory(const Driver& driver, const std::vector<ForeignMemory>& memory);

// Says whose memory a constant is. Of one link: asks the driver once per address.
class ConstantOwners {
 public:
  enum class Owner : uint8_t {
    kNone,     // no address that the driver knows of
    kHeld,     // there as long as the graph
    kForeign,  // numbered by the driver
    kHost,     // memory of the host, not held
    kCached,   // of an allocator that may give it to others
    kStandIn,  // of a recording, and held by somebody
  };
  struct Answer {
    Owner owner = Owner::kNone;
    ForeignMemory memory = {};  // of kForeign; who uses it is the caller's to say
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
