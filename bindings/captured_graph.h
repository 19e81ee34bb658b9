// A compiled function for one signature of its arguments, as an executable graph: the replay.
#pragma once

#include <ATen/core/Generator.h>
#include <Python.h>

#include <atomic>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "arguments.h"
#include "donation.h"
#include "outputs.h"
#include "pygraph/executable.h"
#include "pygraph/fixed_memory.h"
#include "workspace.h"

namespace pygraph {

// Where a graph's random numbers come from: argument `argument`, or the device's default generator.
struct RandomSource {
  static constexpr int kDefaultGenerator = -1;
  int argument = kDefaultGenerator;
};

// Somebody holds an argument whose memory the graph was to use. What it does without that memory
// has not been verified, so such a call goes uncaptured.
class NotGivenAway : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class CapturedGraph {
 public:
  CapturedGraph(const Driver& driver, c10::Device device, std::vector<Argument> arguments,
                OutputPlan outputs, std::vector<RandomSource> random, Graph graph,
                LinkedGraph linked, std::shared_ptr<FixedMemory> fixed_memory,
                std::vector<uint32_t> written);
  ~CapturedGraph();
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  // Whether the graph may be replayed for these arguments.
  bool matches(PyObject* arguments) const;

  // Gives its room in the device's workspace back; the next replay takes what it needs.
  void release_workspace() noexcept;
  // A replay found no memory: what the graph keeps is for the uncaptured run. Where that happens
  // three times in a row, or at more than one call in three, the graph rests for 1000 calls, then
  // for four times as many; each try may make PyTorch's allocator empty its caches.
  void note_no_room();
  // Whether the call is to go uncaptured: `failure` says why. Counts calls where the graph rests.
  bool is_out_of_use();
  // Replays patch addresses from now on as asked, and begin where the other way has stopped. The
  // first time on the device, the graph is copied and instantiated once more. Throws DriverError,
  // and replays go on as before.
  void patch(Patching patching);
  Patching patching() const { return patching_; }
  // Frees what patching in the other way takes.
  void drop_other_patching();

  // The graph is to stay: takes its room, and lets the workspace settle. Throws as replay() does.
  void settle_workspace();

  // Binds the arguments and fresh outputs, launches on PyTorch's current stream and returns the
  // outputs. Needs Python's lock, gives it up from bind to launch. Throws DriverError if the driver
  // refuses, NotGivenAway, c10::Error if the outputs cannot be allocated; nothing was launched.
  // `holders`: how many of the call's own lists hold the arguments; an argument with no other
  // reference is given away, and may be left without memory (see donation.h). 0: none is.
  // `poison`: a byte that fills fresh outputs first, for verification, and internal and fixed
  // memory is filled with ones; -1 for none. Only with poison, and where no argument is given away,
  // does a graph that uses their memory use other memory.
  PyObject* replay(PyObject* arguments, Py_ssize_t holders, int poison = -1);

  const LinkedGraph& linked() const { return executable_->linked(); }
  const ExecutableGraph& executable() const { return *executable_; }
  c10::Device device() const { return device_; }
  uint64_t output_bytes() const;  // of the memory that a replay allocates
  // Internal memory in blocks that are taken for each launch and given back at once.
  uint64_t block_bytes() const;
  // Memory of its own that is kept between launches; and what a replay copies into it and out of
  // it. 0 for a graph that is relocated.
  uint64_t fixed_bytes() const;
  uint64_t copied_bytes() const;
  // Positions of the arguments that a replay may overwrite because the call gives them away.
  std::vector<uint32_t> donated() const;

  // Counters for the report; written without Python's lock.
  std::atomic<uint64_t> replays = 0;
  std::atomic<uint64_t> donated_replays = 0;  // of them, with the memory of donated inputs
  std::atomic<uint64_t> nodes_touched = 0;
  std::string name;     // in profiles
  std::string failure;  // why the graph is not used, for good or while it rests; empty if it is

 private:
  struct Launch;
  // Memory that a launch takes from PyTorch's allocator: a block of outputs, or a region.
  struct Allocation {
    uint64_t bytes = 0;
    bool is_output = false;
    uint32_t index = 0;
  };
  static constexpr uint32_t kNoArgument = ~uint32_t{0};

  // Takes `bytes` of room in the device's workspace, if that is more than it has. Throws
  // c10::OutOfMemoryError where there is none.
  void reserve_workspace(uint64_t bytes);
  bool gives_away(PyObject* arguments, Py_ssize_t holders) const;
  void collect_input_addresses(PyObject* arguments, std::vector<uint64_t>& addresses) const;
  void plan_allocations();
  void allocate(Launch& launch, PyObject* arguments, Donations& donations) const;
  void place_internal_memory(Launch& launch, uint64_t workspace) const;
  void bind_and_launch(Launch& launch);
  void poison_outputs(const Launch& launch) const;
  void poison_internal_memory(const Launch& launch, uint64_t workspace, uint64_t size) const;
  void plan_donations();
  uint64_t workspace_needed(bool donated) const {
    return donated ? linked().workspace_size : linked().workspace_size_if_kept;
  }

  const Driver& driver_;
  c10::Device device_;
  std::vector<Argument> arguments_;
  OutputPlan outputs_;
  std::vector<RandomSource> random_;
  std::vector<uint32_t> slot_arguments_;  // position of the argument, by input slot
  std::vector<GivenAway> donations_;      // that the layout relies on
  // By block of the outputs (see outputs.h): the argument whose memory it takes in calls that give
  // it away, or kNoArgument.
  std::vector<uint32_t> donors_;
  std::vector<Allocation> allocations_;  // of one launch, largest first
  bool draws_ = false;
  uint64_t reserved_ = 0;  // bytes of workspace
  // Of calls without room, two for each, less one for each replay; and of the graph's rests.
  uint32_t without_room_ = 0;
  uint64_t calls_to_rest_ = 0;
  uint64_t next_rest_ = 1000;
  c10::DataPtr random_memory_;                 // 16 bytes (seed, offset) per source
  std::shared_ptr<FixedMemory> fixed_memory_;  // null for a graph that is relocated
  std::vector<uint32_t> written_;              // positions of arguments that copies go back to
  Patching patching_ = Patching::kHost;
  std::unique_ptr<ExecutableGraph> executable_;
  std::unique_ptr<ExecutableGraph> other_;  // patched in the other way
  Workspace& workspace_;
};

}  // namespace pygraph
