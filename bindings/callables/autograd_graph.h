// Autograd's graph of a rehearsed call, which is kept so that it can be run again.
//
// A kept graph must not end in the program's own tensors: hooks on a parameter would run each time
// that the kept graph does, and the node that accumulates a parameter's gradient would stay on the
// stream of a recording. So edges that lead to the program's tensors are redirected to other
// leaves.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace pygraph::bindings {

// The graph between results and the tensors that their gradients flow to.
struct GraphSurvey {
  std::vector<uint32_t> reached;  // positions of the tensors to which edges lead
  bool reaches_others = false;    // a leaf that is none of them
  std::string hooked;             // a node at which a hook waits; empty if there is none
};

// Walks from the results' nodes to `ends`, and not beyond them.
GraphSurvey survey_graph(const std::vector<at::Tensor>& results,
                         const std::vector<at::Tensor>& ends);

// Redirects edges that lead to ends[i] to the leaf instead[i]. No thread may run the graph
// meanwhile.
void reroute_graph(const std::vector<at::Tensor>& results, const std::vector<at::Tensor>& ends,
                   const std::vector<at::Tensor>& instead);

// Whether the node that accumulates the tensor's gradient has hooks. (The tensor's own hooks are
// kept elsewhere.)
bool has_accumulator_hooks(const at::Tensor& tensor);

// What a tensor says about its gradient.
struct GradientKind {
  bool requires_grad = false;
  bool is_retained = false;
  std::optional<at::ScalarType> dtype;  // none: the tensor's own
  bool may_differ = false;              // the gradient's type from `dtype`
  bool operator==(const GradientKind&) const = default;
};

inline GradientKind gradient_kind_of(const torch::autograd::AutogradMeta* autograd) {
  if (autograd == nullptr) return {};
  return {autograd->requires_grad_, autograd->retains_grad_, autograd->grad_dtype_,
          autograd->allow_grad_dtype_mismatch_};
}

// Makes gradients of the tensor, which has no history, flow to the leaf.
void lead_gradients(const at::Tensor& tensor, const at::Tensor& leaf);

// Takes from leaves the nodes that accumulate their gradients, so that a graph that is made
// meanwhile gets nodes of its own, until undo() or the destructor. Meanwhile no other thread may
// use the leaves. Not thread-safe.
class FreshAccumulators {
 public:
  explicit FreshAccumulators(std::vector<at::Tensor> leaves);
  ~FreshAccumulators();
  FreshAccumulators(const FreshAccumulators&) = delete;
  FreshAccumulators& operator=(const FreshAccumulators&) = delete;

  void undo();

 private:
  using Accumulator =
      decltype(torch::autograd::impl::try_get_grad_accumulator(std::declval<at::Tensor>()));
  std::vector<at::Tensor> leaves_;
  std::vector<Accumulator> own_;  // by leaf; null where there was none
};

}  // namespace pygraph::bindings
