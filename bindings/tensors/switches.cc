#include "tensors/switches.h"

#include <ATen/Context.h>
#include <ATen/SavedTensorHooks.h>

namespace pygraph::bindings {

// PyTorch's older getters (allow_tf32, float32_matmul_precision) raise where a program has used
// both the older and the newer way to set precisions. Operators ask as is done here.
Switches current_switches() {
  at::Context& context = at::globalContext();
  uint64_t flags = 0;
  const auto add = [&](auto value, unsigned bits) {
    flags = flags << bits | (static_cast<uint64_t>(value) & ((uint64_t{1} << bits) - 1));
  };
  using Backend = at::Float32Backend;
  using Op = at::Float32Op;
  for (const Op op : {Op::MATMUL, Op::CONV, Op::RNN}) {
    add(context.float32Precision(Backend::CUDA, op) == at::Float32Precision::TF32, 1);
  }
  add(at::NoTF32Guard::should_disable_tf32(), 1);
  add(context.userEnabledCuDNN(), 1);
  add(context.benchmarkCuDNN(), 1);
  add(context.deterministicCuDNN(), 1);
  add(context.deterministicAlgorithms(), 1);
  add(context.deterministicAlgorithmsWarnOnly(), 1);
  add(context.deterministicFillUninitializedMemory(), 1);
  add(context.allowFP16ReductionCuBLAS(), 2);
  add(context.allowBF16ReductionCuBLAS(), 2);
  add(context.allowFP16AccumulationCuBLAS(), 1);
  add(context.userEnabledFlashSDP(), 1);
  add(context.userEnabledFA3SDP(), 1);
  add(context.userEnabledMemEfficientSDP(), 1);
  add(context.userEnabledMathSDP(), 1);
  add(context.userEnabledCuDNNSDP(), 1);
  add(context.userEnabledOverrideableSDP(), 1);
  add(context.allowFP16BF16ReductionMathSDP(), 1);
  for (const at::SDPBackend backend : context.sDPPriorityOrder()) add(backend, 3);
  add(context.linalgPreferredBackend(), 3);
  add(context.blasPreferredBackend(), 3);
  // Under such hooks a program may compare what a replay saves with what an uncaptured call does
  // (python/pygraph/partition/attempt.py).
  add(!at::SavedTensorDefaultHooks::get_tls_state().stack.empty(), 1);
  const std::optional<int32_t> carveout = context._SMCarveout_EXPERIMENTAL();
  add(carveout.has_value(), 1);
  const auto limit = static_cast<uint32_t>(context.benchmarkLimitCuDNN());
  return {flags, uint64_t{limit} << 32 | static_cast<uint32_t>(carveout.value_or(0))};
}

}  // namespace pygraph::bindings
