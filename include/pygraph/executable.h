// The executable graph: binds a linked graph to the addresses of one call and launches it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pygraph/device_patcher.h"
#include "pygraph/link.h"

namespace pygraph {

// How the addresses of a call get into the nodes.
enum class Patching : uint8_t {
  kHost,    // by one driver call per node, before the launch
  kDevice,  // kernels by one kernel for all of them, see device_patcher.h; other nodes as above
};

// One executable graph and its own image of every parameter that can change, because the driver
// cannot be asked for an executable graph's parameters.
//
// Addresses are given by slot: inputs, then outputs, then (slot workspace_slot()) the workspace,
// then one per random state, then one per region, each in the order of the recording. Slots are
// fixed at capture; no address is ever looked up.
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

  size_t slot_count() const { return bound_.size(); }
  size_t workspace_slot() const { return workspace_slot_; }
  size_t region_slot() const { return workspace_slot_ + 1 + linked_.recording.random.size(); }
  const LinkedGraph& linked() const { return linked_; }
  // The addresses of the last bind().
  std::span<const uint64_t> bound() const { return bound_; }
  // The nodes whose addresses can be patched on the device, and what that takes there in bytes.
  size_t nodes_on_device() const;
  uint64_t device_bytes() const;

  // The same graph again, patched in another way. Throws DriverError.
  std::unique_ptr<ExecutableGraph> copy(Patching patching) const;

  // Writes the addresses that differ from the last call's into the nodes that use them: about
  // 0.25 us per touched node. Affects launches made afterwards only; launches in flight keep
  // theirs. Returns the number of nodes touched. Throws DriverError if the driver refuses; the
  // executable is then dropped and built anew by the next bind().
  size_t bind(std::span<const uint64_t> addresses);

  // Enqueues the graph on `stream`. bind() must have succeeded. About 1 us.
  //
  // Where it is patched on the device: 5 us if anything changed. `stream` must wait for the launch
  // before, as the same stream does. The first launch after an instantiation waits for `stream`.
  // Throws DriverError if that does not work, in which case nothing was launched and the next
  // bind() builds the executable anew.
  void launch(CUstream stream);

 private:
  struct BindEntry {  // one word to write
    uint64_t* word;   // in images_
    uint64_t addend;
    uint32_t patch;  // index into patches_
  };
  struct Patch {  // one node to update
    uint32_t node;
    bool is_on_device;  // kernels, unless inside of a child graph
    std::byte* image;
    abi::KernelNodeParams params;  // kernels: points into image
  };

  void lay_out_images();
  void build_bind_table();
  void write_addresses(std::span<const uint64_t> addresses);
  void apply_to_graph(const Patch& patch);
  void apply_to_executable(const Patch& patch);
  void apply_child_graphs();
  void instantiate();
  void make_patcher();
  void patch_on_device(CUstream stream);

  const Driver& driver_;
  const Patching patching_;
  Graph graph_;  // owns the nodes; outlives the executable
  GraphExec exec_;
  LinkedGraph linked_;
  CUcontext context_ = nullptr;
  size_t workspace_slot_ = 0;
  std::unique_ptr<std::byte[]> images_;  // one 128-byte aligned image after another
  std::vector<void*> param_pointers_;    // kernelParams and extra arrays of all patches
  std::vector<size_t> packed_sizes_;     // what extra's size entries point to
  std::vector<Patch> patches_;
  std::vector<BindEntry> entries_;     // sorted by slot
  std::vector<uint32_t> entry_begin_;  // entries of slot s: [entry_begin_[s], entry_begin_[s + 1])
  std::vector<uint64_t> bound_;        // last address of each slot
  std::vector<uint8_t> is_dirty_;      // by patch
  std::vector<uint32_t> dirty_;        // patches touched by the current bind
  std::vector<uint32_t> dirty_children_;

  // Patching::kDevice only.
  std::vector<uint32_t> word_begin_;  // as entry_begin_, of the patcher's words
  std::vector<uint8_t> is_changed_;   // by slot: since the last launch
  std::unique_ptr<DevicePatcher> patcher_;
  bool is_first_launch_ = true;  // of the executable
};

}  // namespace pygraph
