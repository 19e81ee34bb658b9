// A compiled function for one signature of its arguments, as an executable graph: the replay.
#pragma once

#include <Python.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "own_process.h"
#include "pygraph/executable.h"
#include "pygraph/stream_slots.h"
#include "replay/held_blocks.h"
#include "replay/launch.h"
#include "replay/left_gradients.h"
#include "replay/memory_back_off.h"
#include "replay/memory_plan.h"
#include "replay/random_numbers.h"
#include "replay/workspace.h"
#include "tensors/arguments.h"
#include "tensors/outputs.h"
#include "tensors/switches.h"
#include "torch_private/fft_plans.h"

namespace pygraph::bindings {

// The program still holds an argument whose memory the graph would use. The graph is not verified
// without that memory, so the call runs uncaptured.
class NotGivenAway : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The graph cannot be launched on the call's stream without waiting for another stream's work (see
// stream_slots.h). The call runs uncaptured; later ones may replay again.
class StreamNotReady : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Thread-safe beyond Python's lock, which is never held while waiting for another thread or the
// GPU.
class CapturedGraph {
 public:
  static constexpr uint64_t kNoAudit = ~uint64_t{0};

  CapturedGraph(const Driver& driver, c10::Device device, std::vector<Argument> arguments,
                OutputPlan outputs, std::vector<int> random, Graph graph, LinkedGraph linked,
                std::vector<at::Tensor> held, std::optional<FftPlans> fft_plans);
  ~CapturedGraph();
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  // Whether the graph may be replayed for these arguments, under these switches. `known`: positions
  // of arguments that match.
  bool matches(PyObject* arguments, const Switches& switches, Positions known = {}) const;

  // Lays out what an uncaptured call has saved as a replay does (tensors/saved_blocks.h).
  void join_saved(PyObject* outputs) const;

  // Releases its share of the streams' workspaces; the next replay takes it again. Does nothing in
  // a callback of PyTorch's allocator that runs in a launch (is_entered).
  void release_workspace() noexcept;
  // Takes the graph out of use for good: it keeps no memory for launches.
  void fail(std::string reason);
  // To be called when a replay found no memory. Releases the graph's memory for the uncaptured run.
  // If this happens often, the graph rests (memory_back_off.h).
  void note_no_room();
  // Whether this thread has the lock of a graph: it is in a callback of PyTorch's allocator, and
  // must replay none.
  static bool is_entered();
  // Whether the call must run uncaptured; `failure` is the reason. Counts calls while the graph
  // rests.
  bool is_out_of_use();

  // Prepares a graph that is to stay: takes its share of the current stream's workspace, and moves
  // the workspace to its final place. Throws like replay().
  void defragment_workspace();
  // From now on, launches on the current stream find their blocks in its workspace (held_blocks.h),
  // if the workspaces of the device then contain at most `most` bytes of blocks, and as long as
  // PyTorch's allocator has reserved at most `most_reserved`. Throws like replay().
  void hold_blocks(uint64_t most, uint64_t most_reserved);
  // Internal memory that stays allocated, and that a launch allocates and frees.
  uint64_t workspace_bytes() const;
  uint64_t block_bytes() const { return held_blocks_.are_held() ? 0 : plan_.block_bytes(); }

  // Binds the arguments and fresh outputs, launches on PyTorch's current stream and returns the
  // outputs. Needs Python's lock, and releases it from the allocation of outputs to the launch.
  // Throws DriverError, NotGivenAway, StreamNotReady, or c10::Error if memory cannot be allocated;
  // nothing was launched then.
  //
  // `holders`: how many of the call's own lists hold the arguments. An argument without other
  // references is given away, and may be left without memory (donation.h). 0: none is given away.
  // `poison`: a byte that fills fresh outputs before the launch, for verification; internal memory
  // is then filled with ones. -1: no poison. With poison and `holders` 0, a graph that uses donated
  // memory uses other memory instead; without poison it throws NotGivenAway.
  // `generator`: used in place of the device's default generator, which is not changed.
  // `gradients`: whose gradients it leaves; not with poison.
  // `own`: inputs whose addresses have been read, or null.
  PyObject* replay(PyObject* arguments, Py_ssize_t holders, int poison = -1,
                   const std::optional<at::Generator>& generator = std::nullopt,
                   const GradientOwners& gradients = {}, const OwnInputs* own = nullptr);

  const LinkedGraph& linked() const { return executable().linked(); }
  const ExecutableGraph& executable() const { return *replicas_.front()->executable; }
  c10::Device device() const { return device_; }
  // The memory that a launch allocates, and the arguments that it may overwrite.
  const MemoryPlan& plan() const { return plan_; }
  // Whether a replay on the current stream could use the memory of these arguments; as replay().
  bool gives_away(PyObject* arguments, Py_ssize_t holders) const;
  // The sources of a replay's random numbers; empty if it draws none.
  std::vector<int> random_arguments() const { return random_.sources(); }
  // Whether the next call is to be audited, and not replayed (python/pygraph/partition/audit.py).
  bool is_audit_due() const { return replays >= audit_at; }

  // Counters for the report; written without Python's lock.
  std::atomic<uint64_t> replays = 0;
  std::atomic<uint64_t> donated_replays = 0;  // of them, with the memory of donated inputs
  std::atomic<uint64_t> nodes_touched = 0;
  // Number of replays at which an audit is due; written with Python's lock.
  std::atomic<uint64_t> audit_at = kNoAudit;
  std::atomic<uint64_t> calls_elsewhere = 0;  // uncaptured, on streams that were not ready
  std::string name;                           // in profiles
  std::string failure;  // why the graph is not used, for good or while it rests; empty if it is

 private:
  // The memory and executable that launches on one stream write to.
  struct Replica {
    std::unique_ptr<ExecutableGraph> executable;
    std::shared_ptr<Workspace> workspace;
    Workspace::Share share;                 // of it
    c10::DataPtr random_memory;             // 16 bytes (seed, offset) per source
    void reserve(Workspace::Share needed);  // what it has already stays
    void release() noexcept;
    void release_blocks() noexcept;
  };

  // Holds the lock of a graph. To be made without Python's lock.
  class Entered {
   public:
    explicit Entered(CapturedGraph& graph);
    ~Entered();
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;

   private:
    const std::lock_guard<std::mutex> lock_;
  };
  // The replica for the current stream, `stream`; hold the lock. Throws StreamNotReady,
  // DriverError, c10::OutOfMemoryError.
  Replica& replica_for(CallStream stream, size_t& slot);
  static std::vector<std::unique_ptr<Replica>> first_replica(const Driver& driver, Graph graph,
                                                             LinkedGraph linked);
  std::unique_ptr<Replica> new_replica() const;
  std::shared_lock<std::shared_mutex> check_fft_plans() const;
  // What a launch needs of the workspace.
  Workspace::Share share_of(const Launch& launch) const;
  // What launches have needed for blocks that are not held any more; hold the lock.
  void release_blocks() noexcept;
  // After blocks were found in the workspace, or put there: they may have been dropped meanwhile.
  void release_dropped_blocks();
  // Allocates the workspace of the stream, where it is to stay. Throws c10::OutOfMemoryError.
  void place_workspace(CallStream stream);
  CallStream call_stream() const;
  bool gives_away(CallStream stream, PyObject* arguments, Py_ssize_t holders) const;
  void bind_and_launch(Launch& launch, const std::vector<PhiloxPosition>& positions);

  const Driver& driver_;
  c10::Device device_;
  std::vector<Argument> arguments_;
  OutputPlan outputs_;
  std::vector<at::Tensor> held_;       // memory that nodes use where it is
  std::optional<FftPlans> fft_plans_;  // if it uses some
  Switches switches_;                  // that it was recorded under
  MemoryBackOff back_off_;
  LeftGradients left_gradients_;
  HeldBlocks held_blocks_;
  const OwnProcess process_;

  std::mutex mutex_;         // from the choice of a replica to its launch; see Entered
  bool has_failed_ = false;  // for good
  StreamSlots slots_;
  std::vector<std::unique_ptr<Replica>> replicas_;  // by slot; the first one is always there
  const MemoryPlan plan_;
  const RandomNumbers random_;
};

}  // namespace pygraph::bindings
