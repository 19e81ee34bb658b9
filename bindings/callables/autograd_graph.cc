#include "callables/autograd_graph.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>

namespace pygraph::bindings {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Node;

// PyTorch's references to nodes are std::shared_ptr up to some release, and its own later.
template <class T>
std::weak_ptr<T> weak(const std::shared_ptr<T>& strong) {
  return strong;
}

template <class T>
c10::weak_intrusive_ptr<T> weak(const c10::intrusive_ptr<T>& strong) {
  return c10::weak_intrusive_ptr<T>(strong);
}

// Null where no graph leads to the tensor.
Edge edge_to(const at::Tensor& tensor) {
  if (tensor.grad_fn() != nullptr) return torch::autograd::impl::gradient_edge(tensor);
  return Edge(torch::autograd::impl::try_get_grad_accumulator(tensor), 0);
}

// The ends of a walk, by node and by which of its inputs.
class Ends {
 public:
  explicit Ends(const std::vector<at::Tensor>& tensors) {
    for (uint32_t i = 0; i < tensors.size(); ++i) {
      edges_.push_back(edge_to(tensors[i]));
      if (edges_[i].is_valid()) numbers_.emplace(key(edges_[i]), i);
    }
  }

  // -1 for an edge to something else.
  int64_t find(const Edge& edge) const {
    const auto found = numbers_.find(key(edge));
    return found == numbers_.end() ? -1 : static_cast<int64_t>(found->second);
  }

 private:
  using Key = std::pair<const Node*, uint32_t>;
  static Key key(const Edge& edge) { return {&*edge.function, edge.input_nr}; }

  std::vector<Edge> edges_;  // which keep the nodes alive
  std::map<Key, uint32_t> numbers_;
};

// Calls visit_node for each node between the results and the ends, and visit_end for each edge that
// leads to an end, with its number.
template <class VisitNode, class VisitEnd>
void walk(const std::vector<at::Tensor>& results, const Ends& ends, VisitNode visit_node,
          VisitEnd visit_end) {
  std::vector<Node*> pending;
  std::set<Node*> seen;
  const auto follow = [&](Edge& edge) {
    if (!edge.is_valid()) return;
    if (const int64_t end = ends.find(edge); end >= 0) {
      visit_end(edge, static_cast<uint32_t>(end));
    } else if (seen.insert(&*edge.function).second) {
      pending.push_back(&*edge.function);
    }
  };
  for (const at::Tensor& result : results) {
    Edge edge = edge_to(result);
    follow(edge);
  }
  while (!pending.empty()) {
    Node* node = pending.back();
    pending.pop_back();
    visit_node(*node);
    for (Edge& edge : node->next_edges()) follow(edge);
  }
}

bool has_hooks(Node& node) {
  return !node.pre_hooks().empty() || !node.post_hooks().empty() ||
         !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty();
}

}  // namespace

GraphSurvey survey_graph(const std::vector<at::Tensor>& results,
                         const std::vector<at::Tensor>& ends) {
  GraphSurvey survey;
  std::vector<bool> is_reached(ends.size());
  walk(
      results, Ends(ends),
      [&](Node& node) {
        if (has_hooks(node)) survey.hooked = node.name();
        survey.reaches_others |= dynamic_cast<AccumulateGrad*>(&node) != nullptr;
      },
      [&](Edge&, uint32_t end) { is_reached[end] = true; });
  for (uint32_t i = 0; i < ends.size(); ++i) {
    if (is_reached[i]) survey.reached.push_back(i);
  }
  return survey;
}

void reroute_graph(const std::vector<at::Tensor>& results, const std::vector<at::Tensor>& ends,
                   const std::vector<at::Tensor>& instead) {
  if (ends.size() != instead.size()) throw std::invalid_argument("as many leaves as ends");
  std::vector<Edge> edges;
  edges.reserve(instead.size());
  for (const at::Tensor& leaf : instead) {
    edges.push_back(torch::autograd::impl::gradient_edge(leaf));
  }
  walk(
      results, Ends(ends), [](Node&) {}, [&](Edge& edge, uint32_t end) { edge = edges[end]; });
}

bool has_accumulator_hooks(const at::Tensor& tensor) {
  auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr || !meta->requires_grad_) return false;
  decltype(meta->grad_accumulator_.lock()) node;  // ends after the lock: Python may run then
  {
    // An operator of another thread, without Python's lock, may make the node.
    const std::lock_guard lock(meta->mutex_);
    node = meta->grad_accumulator_.lock();
  }
  return node && !(node->pre_hooks().empty() && node->post_hooks().empty());
}

void lead_gradients(const at::Tensor& tensor, const at::Tensor& leaf) {
  torch::autograd::impl::set_gradient_edge(tensor, torch::autograd::impl::gradient_edge(leaf));
}

FreshAccumulators::FreshAccumulators(std::vector<at::Tensor> leaves) : leaves_(std::move(leaves)) {
  own_.reserve(leaves_.size());
  for (const at::Tensor& leaf : leaves_) {
    own_.push_back(torch::autograd::impl::try_get_grad_accumulator(leaf));
    torch::autograd::impl::set_grad_accumulator(leaf, weak(Accumulator()));
  }
}

FreshAccumulators::~FreshAccumulators() {
  undo();
}

void FreshAccumulators::undo() {
  for (size_t i = 0; i < leaves_.size(); ++i) {
    torch::autograd::impl::set_grad_accumulator(leaves_[i], weak(own_[i]));
  }
  leaves_.clear();
  own_.clear();
}

}  // namespace pygraph::bindings
