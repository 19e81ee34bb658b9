#include "pygraph/executable.h"

#include <algorithm>
#include <string>
#include <utility>

#include "instantiate.h"

namespace pygraph {
namespace {

// False if the limit is not what made the driver refuse the parameters, or cannot be raised.
bool raise_shared_memory_limit(const Driver& driver, const Node& node) {
  int limit = 0;
  int fixed = 0;  // bytes of shared memory that the function has by itself
  int device = 0;
  int most = 0;
  const CUfunction function = node.function;
  return driver.function_get_attribute(&limit, abi::kFunctionMaxDynamicSharedBytes, function) ==
             abi::kSuccess &&
         limit >= 0 && static_cast<unsigned>(limit) < node.shared_memory_bytes &&
         driver.function_get_attribute(&fixed, abi::kFunctionSharedBytes, function) ==
             abi::kSuccess &&
         driver.context_get_device(&device) == abi::kSuccess &&
         driver.device_get_attribute(&most, abi::kDeviceMaxSharedBytesPerBlock, device) ==
             abi::kSuccess &&
         driver.function_set_attribute(function, abi::kFunctionMaxDynamicSharedBytes,
                                       most - fixed) == abi::kSuccess;
}

// The driver refuses parameters whose dynamic shared memory exceeds the limit that the function has
// at that time. A library may lower the limit again after the launch that was captured: cuDNN's
// batch norm sets it before each launch to what that launch needs (seen with cuDNN 9 on an H200,
// where the graph of ResNet-18 has launches of one function with 2 to 64 KiB). Then the limit is
// raised to the most that the device allows, and the parameters are set again. That does no harm to
// other users of the function, because the limit is only raised. Throws DriverError, which names
// the kernel.
template <typename Set>
void set_kernel_params(const Driver& driver, const Node& node, const char* call, const Set& set) {
  abi::Result result = set();
  if (result == abi::kInvalidValue && raise_shared_memory_limit(driver, node)) result = set();
  if (result == abi::kSuccess) return;
  const std::string what = std::string(call) + " for the kernel " + node.name + ", " +
                           std::to_string(node.shared_memory_bytes) +
                           " bytes of dynamic shared memory,";
  check_result(driver, result, what.c_str());
}

}  // namespace

ExecutableGraph::ExecutableGraph(const Driver& driver, Graph graph, LinkedGraph linked)
    : driver_(driver),
      graph_(std::move(graph)),
      may_be_for_device_launch_(gains_from_device_launch(linked.recording)),
      linked_(std::move(linked)),
      table_(linked_) {
  PYGRAPH_CHECK(driver_, context_get_current(&context_));
}

std::unique_ptr<ExecutableGraph> ExecutableGraph::copy() const {
  CUgraph raw = nullptr;
  PYGRAPH_CHECK(driver_, graph_clone(&raw, graph_.get()));
  Graph graph(driver_, raw);
  LinkedGraph linked = linked_;
  retarget_nodes(driver_, linked.recording, raw);
  return std::make_unique<ExecutableGraph>(driver_, std::move(graph), std::move(linked));
}

const Node& ExecutableGraph::node_of(const BindTable::PatchedNode& patch) const {
  return linked_.recording.nodes[patch.node];
}

void ExecutableGraph::apply_to_graph(const BindTable::PatchedNode& patch) {
  const Node& node = node_of(patch);
  if (node.kind == NodeKind::kKernel) {
    set_kernel_params(driver_, node, "graph_kernel_set_params",
                      [&] { return driver_.graph_kernel_set_params(node.handle, &patch.params); });
  } else if (node.kind == NodeKind::kMemcpy) {
    const auto* params = reinterpret_cast<const abi::Memcpy3D*>(patch.image);
    PYGRAPH_CHECK(driver_, graph_memcpy_set_params(node.handle, params));
  } else {
    const auto* params = reinterpret_cast<const abi::MemsetNodeParams*>(patch.image);
    PYGRAPH_CHECK(driver_, graph_memset_set_params(node.handle, params));
  }
}

void ExecutableGraph::apply_to_executable(const BindTable::PatchedNode& patch) {
  const Node& node = node_of(patch);
  if (node.parent >= 0) {
    // A child graph is updated as a whole, from its template.
    apply_to_graph(patch);
    const auto parent = static_cast<uint32_t>(node.parent);
    if (std::ranges::find(dirty_children_, parent) == dirty_children_.end()) {
      dirty_children_.push_back(parent);
    }
  } else if (node.kind == NodeKind::kKernel) {
    set_kernel_params(driver_, node, "graph_exec_kernel_set_params", [&] {
      return driver_.graph_exec_kernel_set_params(exec_.get(), node.handle, &patch.params);
    });
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
  for (const BindTable::PatchedNode& patch : table_.patched_nodes()) apply_to_graph(patch);
  const auto make = [&] {
    return pygraph::instantiate(driver_, graph_.get(), linked_.recording,
                                may_be_for_device_launch_);
  };
  try {
    exec_ = make();
  } catch (const DriverError&) {
    if (!std::exchange(may_be_for_device_launch_, false)) throw;
    exec_ = make();
  }
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
        apply_to_executable(table_.patched_nodes()[index]);
      }
      apply_child_graphs();
    }
  } catch (...) {
    // Some nodes have new addresses, some have old ones: never launch that.
    drop();
    may_be_for_device_launch_ = false;
    table_.clean();
    dirty_children_.clear();
    throw;
  }
  table_.clean();
  return touched;
}

void ExecutableGraph::launch(CUstream stream) {
  if (!exec_) throw std::logic_error("launch before a successful bind");
  check_foreign_memory(driver_, linked_.foreign);
  was_launched_ = true;
  if (may_be_for_device_launch_) {
    if (driver_.graph_launch(exec_.get(), stream) == abi::kSuccess) return;
    drop();
    may_be_for_device_launch_ = false;
    instantiate();
    was_launched_ = true;
  }
  PYGRAPH_CHECK(driver_, graph_launch(exec_.get(), stream));
}

void ExecutableGraph::drop() {
  exec_.reset();
  was_launched_ = false;
}

}  // namespace pygraph
