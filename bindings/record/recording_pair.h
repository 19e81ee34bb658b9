// The two recordings of a compiled function, from stand-in arguments to a captured graph.
//
// Python drives it, because torch.cuda.CUDAGraph makes the captures;
// python/pygraph/record/recorder.py shows the order of the calls.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>

#include "record/allocation_log.h"
#include "record/declared_access.h"
#include "replay/captured_graph.h"
#include "tensors/donation.h"
#include "torch_private/blas_workspaces.h"
#include "torch_private/fft_plans.h"

namespace pygraph::bindings {

class RecordingPair {
 public:
  // `arguments` is the real argument list. Throws NotRelocatable for arguments that graphs cannot
  // take, DriverError if stand-in addresses cannot be reserved.
  RecordingPair(const Driver& driver, const pybind11::list& arguments, c10::Device device,
                uint64_t capacity);
  ~RecordingPair();
  RecordingPair(const RecordingPair&) = delete;
  RecordingPair& operator=(const RecordingPair&) = delete;

  // A new list to call the function with in recording `index` (0 or 1): stand-ins for tensors, the
  // same objects otherwise. The pair keeps a copy, as compiled functions clear their list.
  pybind11::list stand_ins(int index);

  // Between these two, the thread's allocations belong to recording `index`, and cuBLAS has no
  // workspaces from before. Around begin and end of the capture on `stream`.
  void begin(int index, CUstream stream);
  void end();
  // Gives cuBLAS its workspaces from before again. To be called once PyTorch's graph is reset.
  void put_back_workspaces();

  // Reads the captured graph. `returned` is what the function returned; it may be freed afterwards.
  // The last `random.size()` nodes are sentinels, one per source (see philox.h). `kernels`: what is
  // known of kernels, by the address of their function.
  void finish(int index, CUgraph graph, PyObject* returned, std::vector<int> random,
              const std::unordered_map<uint64_t, ParameterAccess>& kernels);

  // After either, positions of arguments: those that the function may write to, and those that it
  // returns or returns views of. Whether or not link() throws.
  std::vector<uint32_t> may_write() const;
  std::vector<uint32_t> returned() const;

  // Before link(): tensors that the function refers to, which graphs must hold, and a function that
  // returns the memory of PyTorch's allocator.
  void set_surroundings(std::vector<at::Tensor> held, std::function<std::vector<Range>()> cached);

  // Keeps these pieces of memory valid until the process ends, because an operator still holds
  // them. They were allocated in recording `index`. Returns the name of the operator that allocated
  // them. The pair cannot be used afterwards.
  std::string retain(int index, const std::vector<Range>& pieces);

  // After both: match, scan, plan, and make a graph executable. `sharing` are the outputs that may
  // lie together in one block of memory (see share_blocks). `gradients`: of a forward, bytes of
  // each gradient that its backward will compute (see join_saved_tensors). `given_away`: what calls
  // like this one give away. `lanes`: how many of its nodes may run at a time.
  std::shared_ptr<CapturedGraph> link(const std::vector<uint32_t>& sharing,
                                      const std::vector<uint64_t>& gradients,
                                      const std::vector<GivenAway>& given_away, uint32_t lanes);

  // Whether the tensor lies at a stand-in address of the current recording.
  bool is_recorded(const at::Tensor& tensor) const;

  // For verification: poisons the memory that missed addresses would reach, and checks whether it
  // was written.
  void poison();
  bool untouched();

 private:
  struct Half {  // of one recording
    std::unique_ptr<AddressSpace> space;
    pybind11::object stand_ins;
    std::vector<Range> inputs;
    AllocationLog log;
    Recording recording;
    std::optional<OutputPlan> outputs;
  };

  void use_table_memory();
  Surroundings surroundings() const;
  std::string allocator_of(int index, const Range& piece) const;
  std::vector<DonatedInput> donated_inputs(const std::vector<GivenAway>& given_away) const;

  const Driver& driver_;
  c10::Device device_;
  std::vector<Argument> arguments_;
  pybind11::object original_;  // the real arguments; null once both recordings have stand-ins
  std::array<Half, 2> halves_;
  std::vector<int> random_;
  std::optional<AllocationScope> scope_;
  std::optional<BlasWorkspacesAside> workspaces_before_;
  std::optional<RecordedBlasWorkspaces> workspaces_;
  std::optional<OperatorLog> operator_log_;
  const FftPlans fft_plans_;  // before the first recording
  bool uses_fft_plans_ = false;
  RecordedOperators operators_;               // of the last recording
  std::vector<uint64_t> scratch_;             // alike
  std::optional<std::vector<Range>> tables_;  // on the device; none before the first link()
  int current_ = 0;
  std::vector<at::Tensor> held_;
  std::function<std::vector<Range>()> cached_;
  Graph graph_;  // a clone of the second recording's graph
};

}  // namespace pygraph::bindings
