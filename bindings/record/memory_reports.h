// A receiver of the allocators' reports on this thread.
//
// PyTorch delivers the reports to the thread-local object that holds its profiler's state. Other
// code that asks for the profiler's configuration (custom functions of autograd, if operators are
// observed) reads it from that object without checking its type. So a receiver is derived from the
// profiler's state, as a disabled profiler.
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
