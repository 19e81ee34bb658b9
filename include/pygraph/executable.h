// The executable graph: binds a linked graph to the addresses of one call and launches it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pygraph/bind_table.h"
#include "pygraph/device_patcher.h"
#include "pygraph/handles.h"
#include "pygraph/link.h"

namespace pygraph {

// How the addresses of a call get into the nodes.
enum class Patching : uint8_t {
  kHost,    // by one driver call per node, before the launch
  kDevice,  // kernels by one kernel for all of them (device_patcher.h); other nodes as above
};

// One executable graph. Addresses are given by slot (bind_table.h).
//
// Not thread-safe: hold one lock from bind() to launch().
class ExecutableGraph {
 public:
  // Takes over `graph`, whose nodes linked.recording names. Instantiated by the first bind().
  ExecutableGraph(const Driver& driver, Graph graph, LinkedGraph linked,
                  Patching patching = Patching::kHost);
  ExecutableGraph(ExecutableGraph&&) = delete;
  ExecutableGraph& operator=(ExecutableGraph&&) = delete;
  ~ExecutableGraph();

  size_t slot_count() const { return table_.slot_count(); }
  size_t workspace_slot() const { return table_.workspace_slot(); }
  size_t region_slot() const { return table_.region_slot(); }
  const LinkedGraph& linked() const { return linked_; }
  // The context that was current when it was made.
  CUcontext context() const { return context_; }
  // The addresses of the last bind().
  std::span<const uint64_t> bound() const { return table_.bound(); }
  // The nodes whose addresses can be patched on the device, and what that takes there in bytes.
  size_t nodes_on_device() const;
  uint64_t device_bytes() const;

  // The same graph again, patched in another way. Throws DriverError.
  std::unique_ptr<ExecutableGraph> copy(Patching patching) const;

  // Frees the executable; the next bind() builds it anew. The graph stays, to be copied.
  void drop_executable() noexcept { exec_.reset(); }

  // Writes the addresses that differ from the last call's into the nodes that use them, about
  // 0.25 us per touched node, or leaves that to the device. Affects launches made afterwards only;
  // launches in flight keep theirs. Returns the number of nodes touched. Throws DriverError if the
  // driver refuses; the executable is then dropped and built anew by the next bind().
  size_t bind(std::span<const uint64_t> addresses);

  // Enqueues the graph on `stream`. bind() must have succeeded. About 1 us. Throws MemoryGone.
  // Launches of one executable run one after the other, on whichever streams they are
  // (stream_slots.h).
  //
  // Where it is patched on the device: 5 us if anything changed. `stream` must wait for the launch
  // before, as the same stream does. The first launch after an instantiation waits for `stream`.
  // Throws DriverError if that does not work; nothing was launched then, and the next bind() builds
  // the executable anew.
  void launch(CUstream stream);

 private:
  const Node& node_of(const BindTable::Patch& patch) const;
  bool is_for_device(const BindTable::Patch& patch) const;
  void apply_to_graph(const BindTable::Patch& patch);
  void apply_to_executable(const BindTable::Patch& patch);
  void apply_child_graphs();
  void instantiate();
  bool has_priorities() const;
  void make_patcher();
  void patch_on_device(CUstream stream);

  const Driver& driver_;
  const Patching patching_;
  Graph graph_;  // owns the nodes; outlives the executable
  GraphExec exec_;
  LinkedGraph linked_;
  BindTable table_;
  CUcontext context_ = nullptr;
  std::vector<uint32_t> dirty_children_;

  // Patching::kDevice only.
  std::unique_ptr<DevicePatcher> patcher_;
  std::vector<uint32_t> word_begin_;  // the patcher's words of slot s: [word_begin_[s], ...[s + 1])
  std::vector<uint64_t> on_device_;   // the address of each slot, as of the last launch
  bool is_first_launch_ = true;       // of the executable
};

}  // namespace pygraph
