#include "pygraph/executable.h"

#include <algorithm>

namespace pygraph {

ExecutableGraph::ExecutableGraph(const Driver& driver, Graph graph, LinkedGraph linked,
                                 Patching patching)
    : driver_(driver),
      patching_(patching),
      graph_(std::move(graph)),
      linked_(std::move(linked)),
      table_(linked_) {
  PYGRAPH_CHECK(driver_, context_get_current(&context_));
}

ExecutableGraph::~ExecutableGraph() = default;

std::unique_ptr<ExecutableGraph> ExecutableGraph::copy(Patching patching) const {
  CUgraph raw = nullptr;
  PYGRAPH_CHECK(driver_, graph_clone(&raw, graph_.get()));
  Graph graph(driver_, raw);
  LinkedGraph linked = linked_;
  retarget_nodes(driver_, linked.recording, raw);
  return std::make_unique<ExecutableGraph>(driver_, std::move(graph), std::move(linked), patching);
}

const Node& ExecutableGraph::node_of(const BindTable::Patch& patch) const {
  return linked_.recording.nodes[patch.node];
}

// Copies, fills, and what is inside of a child graph cannot be patched on the device.
bool ExecutableGraph::is_for_device(const BindTable::Patch& patch) const {
  const Node& node = node_of(patch);
  return node.kind == NodeKind::kKernel && node.parent < 0;
}

size_t ExecutableGraph::nodes_on_device() const {
  return static_cast<size_t>(std::ranges::count_if(
      table_.patches(), [&](const BindTable::Patch& patch) { return is_for_device(patch); }));
}

uint64_t ExecutableGraph::device_bytes() const {
  uint64_t words = 0;
  for (size_t slot = 0; slot < slot_count(); ++slot) {
    for (const BindTable::Word& word : table_.words(slot)) {
      words += is_for_device(table_.patches()[word.patch]) ? 1 : 0;
    }
  }
  return words * sizeof(DevicePatcher::Word);
}

void ExecutableGraph::apply_to_graph(const BindTable::Patch& patch) {
  const Node& node = node_of(patch);
  if (node.kind == NodeKind::kKernel) {
    PYGRAPH_CHECK(driver_, graph_kernel_set_params(node.handle, &patch.params));
  } else if (node.kind == NodeKind::kMemcpy) {
    const auto* params = reinterpret_cast<const abi::Memcpy3D*>(patch.image);
    PYGRAPH_CHECK(driver_, graph_memcpy_set_params(node.handle, params));
  } else {
    const auto* params = reinterpret_cast<const abi::MemsetNodeParams*>(patch.image);
    PYGRAPH_CHECK(driver_, graph_memset_set_params(node.handle, params));
  }
}

void ExecutableGraph::apply_to_executable(const BindTable::Patch& patch) {
  const Node& node = node_of(patch);
  if (node.parent >= 0) {
    // A child graph is updated as a whole, from its template.
    apply_to_graph(patch);
    const auto parent = static_cast<uint32_t>(node.parent);
    if (std::find(dirty_children_.begin(), dirty_children_.end(), parent) ==
        dirty_children_.end()) {
      dirty_children_.push_back(parent);
    }
  } else if (node.kind == NodeKind::kKernel) {
    PYGRAPH_CHECK(driver_, graph_exec_kernel_set_params(exec_.get(), node.handle, &patch.params));
  } else if (node.kind == NodeKind::kMemcpy) {
    const auto* params = reinterpret_cast<const abi::Memcpy3D*>(patch.image);
    PYGRAPH_CHECK(driver_,
                  graph_exec_memcpy_set_params(exec_.get(), node.handle, params, context_));
  } else {
    const auto* params = reinterpret_cast<const abi::MemsetNodeParams*>(patch.image);
    PYGRAPH_CHECK(driver_,
                  graph_exec_memset_set_params(exec_.get(), node.handle, params, context_));
  }
}

void ExecutableGraph::apply_child_graphs() {
  for (const uint32_t parent : dirty_children_) {
    CUgraphNode handle = linked_.recording.nodes[parent].handle;
    CUgraph child = nullptr;
    PYGRAPH_CHECK(driver_, graph_child_get_graph(handle, &child));
    PYGRAPH_CHECK(driver_, graph_exec_child_set_params(exec_.get(), handle, child));
  }
  dirty_children_.clear();
}

// The graph itself gets the addresses first, so that nothing in it refers to stand-ins any more.
void ExecutableGraph::instantiate() {
  for (const BindTable::Patch& patch : table_.patches()) apply_to_graph(patch);
  if (patching_ == Patching::kDevice && patcher_ == nullptr) make_patcher();
  CUgraphExec raw = nullptr;
  abi::InstantiateParams params{};
  if (has_priorities()) params.flags = abi::kInstantiateUseNodePriority;
  PYGRAPH_CHECK(driver_, graph_instantiate(&raw, graph_.get(), &params));
  exec_ = GraphExec(driver_, raw);
  is_first_launch_ = true;
}

// Kernels run with the priority of the stream that the graph is launched on, unless asked to keep
// those that they were captured with. A program that gives some of its streams another priority
// than the default one (0) has a reason.
bool ExecutableGraph::has_priorities() const {
  return std::ranges::any_of(linked_.recording.nodes, [&](const Node& node) {
    if (node.kind != NodeKind::kKernel) return false;
    abi::LaunchAttributeValue value{};
    PYGRAPH_CHECK(driver_,
                  graph_kernel_get_attribute(node.handle, abi::kLaunchAttributePriority, &value));
    return value.priority != 0;
  });
}

void ExecutableGraph::make_patcher() {
  const auto patches = table_.patches();
  std::vector<void*> handles(patches.size());
  for (size_t i = 0; i < patches.size(); ++i) {
    if (!is_for_device(patches[i])) continue;
    abi::LaunchAttributeValue value{};
    value.device_updatable.is_updatable = 1;
    PYGRAPH_CHECK(driver_,
                  graph_kernel_set_attribute(node_of(patches[i]).handle,
                                             abi::kLaunchAttributeDeviceUpdatable, &value));
    handles[i] = value.device_updatable.node;
  }
  std::vector<DevicePatcher::Word> words;
  word_begin_.assign(1, 0);
  for (size_t slot = 0; slot < slot_count(); ++slot) {
    for (const auto& [value, addend, patch] : table_.words(slot)) {
      if (handles[patch] == nullptr) continue;
      const auto offset = reinterpret_cast<const std::byte*>(value) - patches[patch].image;
      words.push_back({handles[patch], static_cast<uint64_t>(offset), addend});
    }
    word_begin_.push_back(static_cast<uint32_t>(words.size()));
  }
  patcher_ = std::make_unique<DevicePatcher>(driver_, words);
}

size_t ExecutableGraph::bind(std::span<const uint64_t> addresses) {
  if (addresses.size() != slot_count()) throw std::logic_error("bind: wrong number of addresses");
  table_.write(addresses);
  const size_t touched = table_.dirty().size();
  try {
    if (!exec_) {
      instantiate();
    } else {
      for (const uint32_t index : table_.dirty()) {
        const BindTable::Patch& patch = table_.patches()[index];
        if (patching_ == Patching::kHost || !is_for_device(patch)) apply_to_executable(patch);
      }
      apply_child_graphs();
    }
  } catch (...) {
    // Some nodes have new addresses, some have old ones: never launch that.
    exec_.reset();
    table_.clean();
    dirty_children_.clear();
    throw;
  }
  table_.clean();
  return touched;
}

void ExecutableGraph::patch_on_device(CUstream stream) {
  if (is_first_launch_) {
    // It has all addresses already. Each is written once more, to see that the device does so.
    PYGRAPH_CHECK(driver_, graph_upload(exec_.get(), stream));
    on_device_.clear();
  }
  const auto bound = table_.bound();
  std::vector<DevicePatcher::Change> changes;
  for (size_t slot = 0; slot < bound.size(); ++slot) {
    const bool has_changed = on_device_.empty() || on_device_[slot] != bound[slot];
    const uint32_t begin = word_begin_[slot];
    const uint32_t end = word_begin_[slot + 1];
    if (has_changed && begin != end) changes.push_back({bound[slot], begin, end});
  }
  patcher_->patch(stream, changes);
  if (is_first_launch_) patcher_->confirm(stream);
  on_device_.assign(bound.begin(), bound.end());
  is_first_launch_ = false;
}

void ExecutableGraph::launch(CUstream stream) {
  if (!exec_) throw std::logic_error("launch before a successful bind");
  check_foreign_memory(driver_, linked_.foreign);
  try {
    if (patching_ == Patching::kDevice) patch_on_device(stream);
    PYGRAPH_CHECK(driver_, graph_launch(exec_.get(), stream));
  } catch (...) {
    // Some nodes may have new addresses, some old ones.
    if (patching_ == Patching::kDevice) exec_.reset();
    throw;
  }
}

}  // namespace pygraph
