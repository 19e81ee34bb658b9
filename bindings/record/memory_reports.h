// A receiver of the allocators' reports on this thread.
//
// The reports go to the place where PyTorch's profiler has its state. What else asks the profiler
// for its configuration (autograd's custom functions do, where operators are observed) reads it
// from there without looking what is there. So a receiver is a state of the profiler, a disabled
// one.
#pragma once

#include <torch/csrc/profiler/orchestration/observer.h>

namespace pygraph::bindings {

class MemoryReports : public torch::profiler::impl::ProfilerStateBase {
 public:
  MemoryReports()
      : ProfilerStateBase(
            torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::Disabled)) {
  }
  bool memoryProfilingEnabled() const override { return true; }
  torch::profiler::impl::ActiveProfilerType profilerType() override {
    return torch::profiler::impl::ActiveProfilerType::NONE;
  }
};

}  // namespace pygraph::bindings
