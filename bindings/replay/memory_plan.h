// The sources of memory for a graph's launches: the arguments whose memory it takes over, and the
// allocations from PyTorch's allocator.
#pragma once

#include <Python.h>

#include <cstdint>
#include <vector>

#include "pygraph/alignment.h"
#include "pygraph/executable.h"
#include "replay/launch.h"
#include "replay/own_inputs.h"
#include "tensors/arguments.h"
#include "tensors/donation.h"
#include "tensors/outputs.h"

namespace pygraph::bindings {

class MemoryPlan {
 public:
  // Keeps references to `outputs` and `executable`.
  MemoryPlan(const std::vector<Argument>& arguments, const OutputPlan& outputs,
             const ExecutableGraph& executable, c10::Device device);

  // Positions of the arguments that a launch may overwrite because the call gives them away.
  std::vector<uint32_t> donated() const;
  bool may_donate() const { return !donations_.empty(); }
  // Whether the call gives away all of them; `holders` as in CapturedGraph::replay().
  bool gives_away(PyObject* arguments, Py_ssize_t holders) const;

  uint64_t output_bytes() const;  // that a launch allocates
  // Of internal memory beside the workspace, which a launch allocates and frees unless it is held.
  uint64_t block_bytes() const { return block_bytes_; }
  // Blocks that are held lie behind the rest of the workspace.
  uint64_t workspace_needed(bool donated, bool holds_blocks) const {
    return start_of_blocks(donated) + (holds_blocks ? block_bytes_ : 0);
  }

  // The steps of a launch, in order. The first two need Python's lock.
  // `own`: inputs whose addresses are known, or null.
  void collect_input_addresses(PyObject* arguments, const OwnInputs* own,
                               std::vector<uint64_t>& addresses) const;
  void take_donated(Launch& launch, PyObject* arguments, Donations& donations) const;
  void allocate(Launch& launch) const;
  // `random_memory`: 0 if the graph draws no random numbers.
  void place_internal_memory(Launch& launch, uint64_t workspace, uint64_t random_memory) const;
  // For verification. Throw DriverError.
  void poison_outputs(const Driver& driver, const Launch& launch) const;
  void poison_internal_memory(const Driver& driver, const Launch& launch, uint64_t workspace,
                              uint64_t size) const;

 private:
  // Memory that a launch takes from PyTorch's allocator: a block of outputs, or a region.
  struct Allocation {
    uint64_t bytes = 0;
    bool is_output = false;
    uint32_t index = 0;
  };
  static constexpr uint32_t kNoArgument = ~uint32_t{0};

  uint64_t start_of_blocks(bool donated) const {
    return align_up(donated ? linked_.workspace_size : linked_.workspace_size_if_kept);
  }

  void plan_donations();
  void plan_allocations();

  const OutputPlan& outputs_;
  const ExecutableGraph& executable_;
  const LinkedGraph& linked_;
  c10::Device device_;
  std::vector<uint32_t> slot_arguments_;  // position of the argument, by input slot
  std::vector<GivenAway> donations_;      // that the layout relies on
  // By block of the outputs (see outputs.h): the argument whose memory it takes in calls that give
  // it away, or kNoArgument.
  std::vector<uint32_t> donors_;
  std::vector<Allocation> allocations_;  // of one launch, largest first
  std::vector<uint64_t> block_offsets_;  // by region, in the part of the workspace for blocks
  uint64_t block_bytes_ = 0;
};

}  // namespace pygraph::bindings
