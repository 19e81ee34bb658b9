// The simulated driver's objects. Handles given to callers are pointers to these.
#pragma once

#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "simulator/simulator.h"

namespace pygraph::simulator {

struct Function {
  Kernel kernel;
  std::vector<std::pair<size_t, size_t>> layout;  // (offset, size)
  size_t image_size = 0;
  int max_dynamic_shared = 48 << 10;
};

struct SimulatedGraph;

struct KernelState {
  const Function* function = nullptr;
  std::array<unsigned, 3> grid{};
  std::array<unsigned, 3> block{};
  unsigned shared_memory_bytes = 0;
  bool packed = false;
  std::vector<std::byte> image;
  // Node-owned arrays that the getter hands out.
  std::vector<void*> pointers;
  std::array<void*, 5> extra{};
  size_t packed_size = 0;
};

struct SimulatedNode {
  int type = abi::kNodeEmpty;
  KernelState kernel;
  abi::Memcpy3D memcpy{};
  abi::MemsetNodeParams memset{};
  std::unique_ptr<SimulatedGraph> child;
  SimulatedGraph* owner = nullptr;
  const SimulatedNode* original = nullptr;  // in a clone: the node it was copied from
  int priority = 0;
};

struct SimulatedEdge {
  SimulatedNode* from = nullptr;  // older than `to`
  SimulatedNode* to = nullptr;
  abi::EdgeData data{};
  bool is_programmatic() const { return data.type == 1; }
};

struct SimulatedGraph {
  std::vector<std::unique_ptr<SimulatedNode>> nodes;
  std::vector<SimulatedEdge> edges;
};

struct SimulatedStream {
  unsigned long long id = 0;
  bool is_held = false;             // what is enqueued is done, but not known to be
  SimulatedGraph* graph = nullptr;  // set while capturing
  bool origin = false;              // whether begin_capture was called on this stream
  bool is_global = false;           // the capture, in its mode
  bool invalidated = false;
  std::vector<SimulatedNode*> frontier;  // what the next node depends on
};

struct SimulatedEvent {
  unsigned long long held_by = 0;  // id of the stream that it was recorded on, if that was held
  SimulatedGraph* graph = nullptr;
  std::vector<SimulatedNode*> frontier;
};

struct Page {
  int file = -1;
  size_t size = 0;
};

struct State {
  std::recursive_mutex mutex;
  std::map<std::string, std::unique_ptr<Function>> functions;
  std::map<std::string, std::pair<int, abi::Result>> failures;
  std::map<std::string, int> calls;
  std::optional<std::mt19937> order;  // in which nodes of a graph run; else that of creation
  std::set<std::unique_ptr<SimulatedStream>> streams;
  std::set<void*> objects;               // graphs, executables, events, modules owned by callers
  std::map<uint64_t, size_t> memory;     // allocations
  std::map<uint64_t, size_t> pinned;     // allocations of the host
  std::map<uint64_t, uint64_t> numbers;  // of allocations, by address; never given twice
  uint64_t next_number = 1;
  std::map<uint64_t, size_t> reserved;  // virtual addresses
  std::map<abi::MemoryHandle, Page> pages;
  abi::MemoryHandle next_page = 1;
  uint64_t last_executable_flags = 0;  // of the executable that was instantiated last
  unsigned long long next_stream = 2;  // 1 is the legacy stream
};

State* current_state();  // null while no Simulator exists

inline SimulatedNode* as_node(CUgraphNode node) {
  return reinterpret_cast<SimulatedNode*>(node);
}
inline CUgraphNode as_handle(SimulatedNode* node) {
  return reinterpret_cast<CUgraphNode>(node);
}
inline SimulatedGraph* as_graph(CUgraph graph) {
  return reinterpret_cast<SimulatedGraph*>(graph);
}
inline bool is_kind(CUgraphNode node, int type) {
  return node != nullptr && as_node(node)->type == type;
}

// Copies `source` and what it contains; `original` of each copy names its source.
std::unique_ptr<SimulatedGraph> copy_graph(const SimulatedGraph& source);
SimulatedNode* find_copy(const SimulatedGraph& copy, CUgraphNode original);  // or null
// Whether a launch asks for more dynamic shared memory than its function may have now.
bool exceeds_shared_memory(const abi::KernelNodeParams& params);
void set_kernel_params(KernelState& kernel, const abi::KernelNodeParams& params);
void run_node(const SimulatedNode& node);
void run_graph(const SimulatedGraph& graph);  // order.cc
// A kernel's parts; other nodes have no prologue, and no kernel runs without its own.
void run_prologue(const SimulatedNode& node);
void run_body(const SimulatedNode& node);

// Either runs the node now or, if the stream captures, appends it. Takes what `node` holds.
abi::Result enqueue(CUstream stream, std::unique_ptr<SimulatedNode> node);

// To be asked before an allocation: false if a capture in global mode forbids it, which is invalid
// from then on.
bool may_allocate();

// One function per member of Driver, named like it.
namespace functions {
#define PYGRAPH_DECLARE(member, symbol, version, ...) abi::Result member(__VA_ARGS__);
PYGRAPH_DRIVER_FUNCTIONS(PYGRAPH_DECLARE)
#undef PYGRAPH_DECLARE
}  // namespace functions

}  // namespace pygraph::simulator
