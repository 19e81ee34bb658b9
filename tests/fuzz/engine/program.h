// A random program as data: what it allocates and frees, and what its kernels, copies and fills
// access. It is run once as it stands (reference.h) and once by the engine (replays.h).
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace pygraph::fuzz {

constexpr uint32_t kNever = std::numeric_limits<uint32_t>::max();
constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();
constexpr uint32_t kMostStreams = 3;

enum class ValueKind : uint8_t {
  kInput,
  kInternal,  // allocated and, mostly, freed by the program
  kOutput,    // allocated by the program, never freed
  kScratch,   // a library's: no operator reads what another one left there
  kConstant,  // memory that the graph does not relocate
  kRandom,    // seed and offset of a random-number generator
  kTable,     // internal memory that holds an address of other memory
};

// Whether the program allocates it.
constexpr bool is_made(ValueKind kind) {
  return kind == ValueKind::kInternal || kind == ValueKind::kTable || kind == ValueKind::kOutput ||
         kind == ValueKind::kScratch;
}

struct Value {
  ValueKind kind = ValueKind::kInternal;
  uint64_t size = 0;         // bytes
  uint32_t born = 0;         // allocated when so many steps were captured, on the next one's stream
  uint32_t freed = kNever;   // likewise
  uint32_t low_bits = 0;     // inputs: of the stand-in's address
  uint64_t given = 0;        // inputs: bytes that may be overwritten after the last use; 0: none
  uint32_t view_of = kNone;  // inputs: lies in the memory of that one, which is given away
  uint64_t view_offset = 0;
  bool shares = false;  // outputs: may lie beside others in a donated input
  // Freed after the allocations for the next step and before its launch, which may still use it.
  bool lingers = false;
};

constexpr bool is_alive(const Value& value, uint32_t step) {
  return value.born <= step && (step < value.freed || (value.lingers && step == value.freed));
}

struct Access {
  uint32_t value = 0;
  uint64_t offset = 0;
  uint64_t size = 0;
  bool reads = false;
  bool writes = false;
  bool is_early = false;        // before the kernel waits for the one in front of it
  bool by_end = false;          // the kernel gets begin and end, not begin and a size
  uint32_t through = kNone;     // the address comes from this table, not from the parameters
  bool stores_address = false;  // into the table `through`; accesses nothing else
};

enum class LaunchKind : uint8_t { kKernel, kCopy, kFill };

struct Launch {
  LaunchKind kind = LaunchKind::kKernel;
  uint32_t layout = 0;  // kernels: of the parameters
  bool is_packed = false;
  uint32_t order = 0;  // seed of the order in which addresses and the rest stand
  std::vector<Access> accesses;
  std::vector<std::pair<uint32_t, uint64_t>> leftovers;  // addresses (value, offset) without use
  uint32_t noise = 0;        // words that differ between recordings and are no addresses
  bool has_stray = false;    // a stand-in address that belongs to no memory
  bool has_foreign = false;  // an address of other device memory
};

struct Step {
  std::vector<Launch> launches;  // several: one child graph
  bool is_child = false;
  bool is_declared = false;
  uint32_t op = kNone;
  bool overlaps = false;  // launched with programmatic stream serialization behind a kernel
  bool waits = true;      // if so: for that kernel, before it does what is not early
  uint32_t stream = 0;    // 0: the one that the capture began on
  uint32_t joined = 0;    // streams, a bit for each: the step's stream waits for their work so far
};

struct Program {
  std::vector<Value> values;
  std::vector<Step> steps;
  uint32_t lanes = 1;
  uint64_t smallest_block = 0;
  bool has_gaps = true;  // between internal allocations, other ones in each recording
  uint32_t replays = 2;
  uint32_t seed = 0;  // of addresses and contents
};

// Makes a program out of what may not be one: drops what accesses memory that is not there or that
// nobody wrote, forgets declarations that would not be true, and early uses that would race. Joins
// streams where steps would race, and frees memory only when its stream waits for all its uses.
void normalise(Program& program);

// As text, a line for each value and step, and back. Throws std::runtime_error.
std::string to_text(const Program& program);
Program from_text(const std::string& text);

}  // namespace pygraph::fuzz
