// The executable graph: binds a linked graph to the addresses of one call and launches it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pygraph/bind_table.h"
#include "pygraph/handles.h"
#include "pygraph/link.h"

namespace pygraph {

// One executable graph. Addresses are given by slot (bind_table.h).
//
// Not thread-safe: hold one lock from bind() to launch().
class ExecutableGraph {
 public:
  // Takes ownership of `graph`, whose nodes linked.recording describes. The first bind()
  // instantiates it.
  ExecutableGraph(const Driver& driver, Graph graph, LinkedGraph linked);
  ExecutableGraph(ExecutableGraph&&) = delete;
  ExecutableGraph& operator=(ExecutableGraph&&) = delete;

  size_t slot_count() const { return table_.slot_count(); }
  size_t workspace_slot() const { return table_.workspace_slot(); }
  size_t region_slot() const { return table_.region_slot(); }
  const LinkedGraph& linked() const { return linked_; }
  // The CUDA context that was current at construction.
  CUcontext context() const { return context_; }
  // The addresses of the last bind().
  std::span<const uint64_t> bound() const { return table_.bound(); }

  // A copy of the graph, with an executable of its own. Throws DriverError.
  std::unique_ptr<ExecutableGraph> copy() const;

  // Writes the addresses (one per slot) that differ from the last bind()'s into the nodes that use
  // them, about 0.2 us per touched node. Affects later launches only. Returns the number of nodes
  // touched. Throws DriverError if the driver refuses; the executable is then dropped, and the next
  // bind() instantiates another one.
  size_t bind(std::span<const uint64_t> addresses);

  // Enqueues the graph on `stream`, in about 1 us. bind() must have succeeded. Launches of one
  // executable run one after the other, even on different streams (stream_slots.h). Throws
  // MemoryGone or DriverError; nothing was launched then.
  void launch(CUstream stream);

  // Whether the executable of the last bind() was launched.
  bool was_launched() const { return was_launched_; }
  // Destroys the executable; the next bind() instantiates another one. Launches under way go on:
  // the driver keeps what they need until they end (cuGraphExecDestroy).
  void drop();

 private:
  const Node& node_of(const BindTable::PatchedNode& patch) const;
  void apply_to_graph(const BindTable::PatchedNode& patch);
  void apply_to_executable(const BindTable::PatchedNode& patch);
  void apply_child_graphs();
  void instantiate();

  const Driver& driver_;
  Graph graph_;  // owns the nodes; outlives the executable
  GraphExec exec_;
  bool was_launched_ = false;
  bool may_be_for_device_launch_;  // src/instantiate.h; until the driver refuses something
  LinkedGraph linked_;
  BindTable table_;
  CUcontext context_ = nullptr;
  std::vector<uint32_t> dirty_children_;
};

}  // namespace pygraph
