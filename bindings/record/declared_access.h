// The known accesses of recorded kernels: from the schema of the operator that launched them, or
// from the compiler that generated them. The engine derives branches from them
// (Node::has_known_accesses; src/branches.h).
//
// Operators: PyTorch reports every operator on this thread (at::RecordFunction, the profiler's
// interface). For the operators listed in declared_access.cc, the schema says which arguments are
// written. Memory that is allocated meanwhile, and libraries' scratch memory, counts as written
// too. Other addresses among the kernels' parameters are leftovers: large structs are launched with
// whatever their padding held.
//
// Inductor's Triton kernels: the compiler states for each parameter whether it is only read.
#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "pygraph/recording.h"
#include "record/table_log.h"

namespace pygraph::bindings {

// A kernel's parameters, one letter each: 'r' for an address that is only read from, 'w' for one
// that may be written to, '-' for no address. Parameters beyond them are the launcher's own.
using ParameterAccess = std::string;

// A listed operator that was called while recording, with the nodes that were captured meanwhile.
struct RecordedOperator {
  uint32_t first = 0;  // positions: [first, last)
  uint32_t last = 0;
  std::vector<Range> reads;  // storages of arguments
  std::vector<Range> writes;
};

// The operators of one recording.
struct RecordedOperators {
  std::vector<Operator> all;             // the outermost ones
  std::vector<Operator> inner;           // PyTorch's own that others call
  std::vector<RecordedOperator> listed;  // alone, or inside others
  std::vector<HostTable> tables;         // that listed ones copied (table_log.h)
  bool uses_fft_plans = false;           // of PyTorch's cache (fft_plans.h)
  std::string failure;                   // why they are not complete; empty if they are

  // The recording's own stream has a workspace that is not the recording's: any of them may use it.
  void doubt_workspaces();
};

// Collects operators from construction to destruction, on the constructing thread. One at a time.
class OperatorLog {
 public:
  // `stream`, of the device, is the one that captures into `space`.
  OperatorLog(const Driver& driver, int device, CUstream stream, Range space);
  ~OperatorLog();
  OperatorLog(const OperatorLog&) = delete;
  OperatorLog& operator=(const OperatorLog&) = delete;

  RecordedOperators take();

 private:
  void enter_any(const at::RecordFunction& function, int depth);
  void begin(Operator& op, const at::RecordFunction& function) const;
  static void note_arguments(Operator& op, const at::RecordFunction& function, bool is_foreign);
  static void note_tensors(Operator& op, const at::RecordFunction& function);
  void enter_listed(const at::RecordFunction& function);
  void leave_any(int depth);
  void leave_listed();
  static std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function);
  static void leave(const at::RecordFunction& function, at::ObserverContext* context);

  const Driver& driver_;
  int device_;
  CUstream stream_;
  Range space_;
  int depth_ = 0;  // of operators inside each other
  Operator outermost_;
  int inner_depth_ = 0;  // where the inner one is that has been entered; 0: none has
  Operator inner_;
  int custom_depth_ = 0;  // one more than where the outermost custom operator is; 0: none has
  int listed_depth_ = 0;
  bool is_known_ = false;  // what the outermost listed one writes
  RecordedOperator listed_;
  TableLog tables_;
  RecordedOperators operators_;
  at::CallbackHandle handle_;
};

// Sets the known accesses of the recording's nodes. `kernels`: by the address of their function.
// Throws NotRelocatable where the operators are not complete.
void declare_accesses(Recording& recording, RecordedOperators operators,
                      const std::unordered_map<uint64_t, ParameterAccess>& kernels);

}  // namespace pygraph::bindings
