// Linking: turns two recordings of one computation, made at different addresses, into a graph in
// which every address is known as (symbol + addend).
//
//   Recording A (addresses a_i) --+
//                                 +-- match --> scan relocations --> find branches --+
//   Recording B (addresses b_i) --+                                                  |
//                                       LinkedGraph <-- plan memory <----------------+
//
// The terms are a linker's: a symbol is a piece of memory the graph refers to, a relocation a place
// that holds the symbol's address plus an addend.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pygraph/constants.h"
#include "pygraph/recording.h"

namespace pygraph {

enum class SymbolKind : uint8_t {
  kInput,     // known at each call
  kOutput,    // known at each call: fresh memory
  kInternal,  // a fixed place in the workspace, which graphs share
  kRandom,    // seed and offset of a random-number generator: two 8-byte words, written per call
};

struct Symbol {
  SymbolKind kind = SymbolKind::kInternal;
  uint32_t slot = 0;   // which input, output, random state; unused for kInternal
  uint64_t size = 0;   // bytes
  uint32_t first = 0;  // lifetime in nodes, as in Allocation
  uint32_t last = Allocation::kNever;
  uint64_t address_a = 0;  // its address in each recording
  uint64_t address_b = 0;
  // kInternal only: its place, in bytes from the start of region `region - 1` or, where that is 0,
  // of the workspace.
  uint64_t workspace_offset = 0;
  uint32_t region = 0;
};

// An input whose memory the caller may give away, because nothing reads it after the launch.
// (PyTorch calls it a donated buffer: a tensor saved for a backward that runs once.)
struct DonatedInput {
  uint32_t slot = 0;
  uint64_t size = 0;  // bytes from its address on that may be overwritten
  // Inputs that lie in the same memory, such as the parts of one tensor: all are given away.
  std::vector<uint32_t> views = {};
};

// A region: internal memory outside the workspace. It lies in a donated input, after that input's
// last use; in the memory of an output, before the output's first use; or in a block of its own.
struct Region {
  static constexpr uint32_t kOwnBlock = ~uint32_t{0};
  static constexpr uint32_t kNoOutput = ~uint32_t{0};
  uint32_t input = kOwnBlock;    // slot
  uint32_t output = kNoOutput;   // of a block: the slot of the output whose memory it is
  uint64_t size = 0;             // bytes that this memory must have, even if the output is smaller
  uint64_t fallback_offset = 0;  // in the workspace, for calls that do not donate the input
};

// How a graph may place its memory.
struct MemoryOptions {
  std::vector<DonatedInput> donated = {};
  // Outputs, by slot, that may lie side by side in one donated input and keep each other's memory.
  std::vector<uint32_t> sharing = {};
  // Internal allocations of this many bytes and more are placed in blocks, not in the workspace. A
  // block is the memory of an output that is used later, or has the size of its largest allocation;
  // the uncaptured program allocates that size, too, so the allocator has a piece that fits. 0: no
  // blocks.
  uint64_t smallest_block = 0;
};

struct Relocation {
  uint32_t node = 0;    // index into Recording::nodes
  uint32_t offset = 0;  // of the 8-byte word in the node's image
  uint32_t symbol = 0;  // index into LinkedGraph::symbols
  uint64_t addend = 0;
};

// The place of an output in a donated input. The input's last use comes before the output's first
// use, and the outputs placed in it fill at least two thirds of it, or one of them half.
struct OutputPlacement {
  static constexpr uint32_t kNone = ~uint32_t{0};
  uint32_t input = kNone;  // slot
  uint64_t offset = 0;     // in bytes; 0 for an output that is alone in the input
  explicit operator bool() const { return input != kNone; }
  bool operator==(const OutputPlacement&) const = default;
};

// A node with known accesses has an address of memory that no symbol stands for: memory that the
// graph holds, or foreign memory. `is_argument`: it is one of those that the node is known to use.
struct OtherMemoryUse {
  uint32_t node = 0;
  bool is_argument = false;
  bool writes = false;  // or may write
};

struct LinkedGraph {
  Recording recording;  // the second one; its graph is the one to instantiate
  std::vector<Symbol> symbols;
  std::vector<Relocation> relocations;  // sorted by (node, offset)
  // Bytes of workspace that a launch needs: if all its donated inputs are given away, and if the
  // caller keeps them.
  uint64_t workspace_size = 0;
  uint64_t workspace_size_if_kept = 0;
  std::vector<Region> regions;
  std::vector<DonatedInput> donated;        // inputs that contain outputs or regions
  std::vector<OutputPlacement> placements;  // by output slot
  // Number of words that count as uninitialised padding: words that differ and are not addresses,
  // and addresses of memory that the operator was not given.
  uint32_t noise_words = 0;
  // Number of words that are stand-in addresses and belong to no symbol: leftovers in padding, or
  // addresses that PyGraph does not understand. Only a verification with poisoned stand-ins may
  // accept a graph with such words.
  uint32_t unexplained_words = 0;
  // Foreign memory that the graph uses; to be checked by check_foreign_memory() before each launch.
  std::vector<ForeignMemory> foreign;
  std::vector<OtherMemoryUse> uses_of_other_memory;
  // The maximum number of nodes that may run at the same time; 1 if the recorded order is kept.
  uint32_t lanes = 1;
  // Whether the recording's edges differ from those of the recorded graph; set_edges() applies
  // them.
  bool has_new_edges = false;
};

// Links two recordings. Throws NotRelocatable if they are not the same computation, if an address
// belongs to no known memory, or if a node that must be updated cannot be. `lanes`: the maximum
// number of nodes that may run at the same time, if the second recording has nodes with known
// accesses; 1 keeps the recorded order.
LinkedGraph link(const Driver& driver, const Recording& first, Recording second,
                 const MemoryOptions& memory = {}, uint32_t lanes = 1,
                 const Surroundings& surroundings = {});

// The steps of link(), in order; public for tests and tools.
void match_recordings(const Recording& a, const Recording& b);
void scan_relocations(const Driver& driver, const Recording& a, LinkedGraph& linked,
                      const Surroundings& surroundings = {});
void plan_memory(LinkedGraph& linked, const MemoryOptions& options = {});

// Symbols and relocations as text: one line per symbol, then one per relocated word.
std::string link_map(const LinkedGraph& linked);
// The graph in the DOT language, kernels labelled with the symbols they use.
std::string to_dot(const LinkedGraph& linked);

}  // namespace pygraph
