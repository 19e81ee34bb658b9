// A recording: the nodes of one captured graph with their parameter images, the memory that was
// allocated during the capture, and the addresses of the caller's inputs and outputs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "pygraph/driver.h"

namespace pygraph {

// The graph cannot be relocated; what() is the reason that reports show
// (docs/reference/reasons.md). Not an error of the program, which runs uncaptured.
class NotRelocatable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Range {
  uint64_t address = 0;
  uint64_t size = 0;  // bytes
  bool contains(uint64_t other) const { return other - address < size; }
};

enum class NodeKind : uint8_t { kKernel, kMemcpy, kMemset, kChildGraph, kEmpty };

struct Node {
  CUgraphNode handle = nullptr;
  NodeKind kind = NodeKind::kEmpty;
  int parent = -1;        // index of the child-graph node that contains this node, or -1
  uint32_t position = 0;  // its top-level node's place in the order of creation

  // Kernels only.
  std::string name;
  CUfunction function = nullptr;
  CUkernel kernel = nullptr;
  CUcontext context = nullptr;
  std::array<unsigned, 3> grid{};
  std::array<unsigned, 3> block{};
  unsigned shared_memory_bytes = 0;
  bool packed = false;        // the parameters came as one buffer (`extra`), not one by one
  std::vector<Range> params;  // (offset in `image`, size) of each parameter, unless packed

  // The bytes that hold addresses: a kernel's parameters, laid out as the driver lays them out, or
  // the driver's parameter struct of a memcpy (abi::Memcpy3D) or memset (abi::MemsetNodeParams).
  std::vector<std::byte> image;

  // The node's accesses to memory, if they are known. Then, of all memory that the recording's
  // nodes write, the node reads and writes only through the addresses at these offsets in its
  // image, and writes only through those in `writes`. Other addresses are leftovers in padding.
  bool has_known_accesses = false;
  std::vector<uint32_t> reads;
  std::vector<uint32_t> writes;
  // The operator that launched the node, if the recorder knows it. Nodes of one operator share
  // scratch memory, and may pass data to each other in unknown ways.
  static constexpr uint32_t kNoOperator = std::numeric_limits<uint32_t>::max();
  uint32_t op = kNoOperator;

  // Offsets in `image` that can hold an 8-byte address.
  std::vector<uint32_t> address_offsets() const;
  uint64_t word_at(uint32_t offset) const;  // of `image`
  // Whether the node may access the memory that the address at this offset points to, whether or
  // not its accesses are known.
  bool may_access(uint32_t offset) const;
};

struct Edge {
  uint32_t from = 0;  // indices into Recording::nodes
  uint32_t to = 0;
  abi::EdgeData data{};
  bool operator==(const Edge&) const = default;
};

// Memory that was allocated while recording. Node k may use it if first <= k < last.
struct Allocation {
  static constexpr uint32_t kNever = std::numeric_limits<uint32_t>::max();
  uint64_t address = 0;
  uint64_t size = 0;       // bytes
  uint32_t first = 0;      // nodes captured when it was allocated
  uint32_t last = kNever;  // nodes captured when it was freed; kNever: alive at the end
};

// Collects allocations in the order of their events.
class AllocationLog {
 public:
  void allocate(uint64_t address, uint64_t size, uint32_t node_count);
  void free(uint64_t address, uint32_t node_count);  // unknown addresses are ignored
  const std::vector<Allocation>& allocations() const { return allocations_; }

 private:
  std::vector<Allocation> allocations_;
};

// A random-number generator during a capture: kernels hold the addresses of its seed and of its
// offset (PyTorch's PhiloxCudaState), and advance it by `increment` in total.
struct RandomState {
  uint64_t seed_address = 0;
  uint64_t offset_address = 0;
  uint64_t increment = 0;
};

// Bytes of a generator's seed and offset, side by side.
constexpr uint64_t kRandomStateSize = 16;

// An operator that the framework called while recording.
struct Operator {
  std::string name;    // "aten::mm"
  uint32_t first = 0;  // positions of the nodes that were captured meanwhile: [first, last)
  uint32_t last = 0;
  // Whether it is not one of the framework's own operators, or works on tensors whose memory is not
  // known. Nothing is known about its use of addresses: its kernels may keep one in memory, and use
  // it later, also in another call.
  bool is_foreign = false;
  // Whether a custom operator called it: its numbers may be computed from addresses.
  bool is_called_by_custom = false;
  // Whether it worked on a stream on which libraries have workspaces that are not the recording's.
  // In most cases that is another stream than the capture's.
  bool is_on_side_stream = false;
  // The storages of its tensors, and of those that it gives to the framework's operators.
  std::vector<Range> arguments = {};
  std::vector<Range> writes = {};  // those of `arguments` that it may write to
};

// What a copy read from pinned memory of the host while it was recorded (host_tables.h).
struct HostTable {
  uint32_t position = 0;  // of the copy's node, which is a top-level one
  std::vector<std::byte> bytes;
  bool operator==(const HostTable&) const = default;
};

struct Recording {
  std::vector<Node> nodes;  // in the order of creation; a child graph's nodes follow their parent
  std::vector<Edge> edges;  // sorted by (from, to)
  std::vector<Allocation> allocations;
  std::vector<Range> inputs;      // by slot
  std::vector<uint64_t> outputs;  // by slot: an address inside the allocation that backs it
  std::vector<RandomState> random;
  // Addresses of allocations that libraries use as scratch memory: no operator reads what another
  // one left there. They are alive at the end. Earlier allocations may have had the same address.
  std::vector<uint64_t> scratch;
  Range address_space;              // all stand-in addresses of this recording lie here
  std::vector<Operator> operators;  // in the order of the calls; no nested ones
  // The framework's own operators that others call. Their arguments are known as well.
  std::vector<Operator> inner_operators;
  std::vector<HostTable> tables;  // of operators whose tables depend on sizes alone; by position

  // Whether the allocation at this address that is freed at node `last` is scratch memory.
  bool is_scratch(uint64_t address, uint32_t last) const;
  // The operator that captured the node, or null if none is known.
  const Operator* operator_of(const Node& node) const;
  // The one whose arguments tell which memory the node was given: an inner operator, or else
  // operator_of().
  const Operator* launcher_of(const Node& node) const;
};

// Reads nodes and edges of `graph`, child graphs included. Throws NotRelocatable for a kind of node
// that PyGraph does not understand, DriverError if the driver fails.
Recording read_graph(const Driver& driver, CUgraph graph);

// Replaces the edges of the graph by those of the recording. The recording's handles are the
// graph's top-level nodes.
void set_edges(const Driver& driver, CUgraph graph, const Recording& recording);

// Points the nodes' handles at `clone`, a clone (cuGraphClone) of the graph they were read from.
void retarget_nodes(const Driver& driver, Recording& recording, CUgraph clone);

}  // namespace pygraph
