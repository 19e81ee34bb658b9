// What the nodes of the simulated driver do, and in which order.
#include <algorithm>

#include "simulator/state.h"

namespace pygraph::simulator {
namespace {

void run_memcpy(const abi::Memcpy3D& copy) {
  const bool is_from_host = copy.src_memory_type == abi::kMemoryTypeHost;
  const bool is_to_host = copy.dst_memory_type == abi::kMemoryTypeHost;
  const auto* source =
      is_from_host ? copy.src_host : reinterpret_cast<const void*>(copy.src_device);
  auto* destination = is_to_host ? copy.dst_host : reinterpret_cast<void*>(copy.dst_device);
  std::memcpy(static_cast<std::byte*>(destination) + copy.dst_x_bytes,
              static_cast<const std::byte*>(source) + copy.src_x_bytes, copy.width_bytes);
}

void run_memset(const abi::MemsetNodeParams& fill) {
  for (size_t row = 0; row < std::max<size_t>(fill.height, 1); ++row) {
    auto* line = reinterpret_cast<std::byte*>(fill.dst + row * fill.pitch);
    for (size_t i = 0; i < fill.width; ++i) {
      std::memcpy(line + i * fill.element_size, &fill.value, fill.element_size);
    }
  }
}

void run_kernel(const KernelState& kernel, const std::function<void(void** params)>& part) {
  std::vector<std::byte> image = kernel.image;  // the launch's own copy
  image.resize(std::max(image.size(), kernel.function->image_size));
  std::vector<void*> params;
  for (const auto& [offset, size] : kernel.function->layout) {
    params.push_back(image.data() + offset);
  }
  part(params.data());
}

// Two events for each node, its prologue (2 i) and its body (2 i + 1), and which wait for which.
class Events {
 public:
  explicit Events(const SimulatedGraph& graph)
      : after_(2 * graph.nodes.size()), waits_for_(2 * graph.nodes.size(), 0) {
    std::map<const SimulatedNode*, size_t> index_of;
    for (size_t i = 0; i < graph.nodes.size(); ++i) {
      index_of[graph.nodes[i].get()] = i;
      add(2 * i, 2 * i + 1);
    }
    std::vector<std::vector<size_t>> overlapped(graph.nodes.size());  // by each node
    for (const SimulatedEdge& edge : graph.edges) {
      if (edge.is_programmatic()) overlapped[index_of[edge.to]].push_back(index_of[edge.from]);
    }
    for (const SimulatedEdge& edge : graph.edges) {
      const size_t from = index_of[edge.from];
      const size_t to = index_of[edge.to];
      if (edge.is_programmatic()) {
        add(2 * from, 2 * to);
        if (edge.to->kernel.function->kernel.waits) add(2 * from + 1, 2 * to + 1);
        continue;
      }
      std::vector<size_t> ended = {from};
      for (size_t i = 0; i < ended.size(); ++i) {
        add(2 * ended[i] + 1, 2 * to);
        const std::vector<size_t>& more = overlapped[ended[i]];
        ended.insert(ended.end(), more.begin(), more.end());
      }
    }
  }

  template <typename Choose, typename Run>
  void run(Choose&& choose, Run&& run_event) {
    std::vector<size_t> ready;
    for (size_t e = 0; e < after_.size(); ++e) {
      if (waits_for_[e] == 0) ready.push_back(e);
    }
    while (!ready.empty()) {
      const size_t place = choose(ready.size());
      const size_t event = ready[place];
      ready[place] = ready.back();
      ready.pop_back();
      run_event(event);
      for (const size_t next : after_[event]) {
        if (--waits_for_[next] == 0) ready.push_back(next);
      }
    }
  }

 private:
  void add(size_t before, size_t after) {
    after_[before].push_back(after);
    ++waits_for_[after];
  }
  std::vector<std::vector<size_t>> after_;
  std::vector<size_t> waits_for_;
};

}  // namespace

void run_prologue(const SimulatedNode& node) {
  if (node.type != abi::kNodeKernel || !node.kernel.function->kernel.prologue) return;
  run_kernel(node.kernel, node.kernel.function->kernel.prologue);
}

void run_body(const SimulatedNode& node) {
  if (node.type == abi::kNodeKernel) {
    run_kernel(node.kernel, node.kernel.function->kernel.body);
  } else if (node.type == abi::kNodeMemcpy) {
    run_memcpy(node.memcpy);
  } else if (node.type == abi::kNodeMemset) {
    run_memset(node.memset);
  } else if (node.type == abi::kNodeGraph) {
    run_graph(*node.child);
  }
}

void run_node(const SimulatedNode& node) {
  run_prologue(node);
  run_body(node);
}

void run_graph(const SimulatedGraph& graph) {
  std::optional<std::mt19937>& order = current_state()->order;
  if (!order) {
    // Creation order respects every edge, since an edge always leads to a younger node.
    for (const auto& node : graph.nodes) run_node(*node);
    return;
  }
  const auto choose = [&](size_t count) { return (*order)() % count; };
  Events(graph).run(choose, [&](size_t event) {
    const SimulatedNode& node = *graph.nodes[event / 2];
    event % 2 == 0 ? run_prologue(node) : run_body(node);
  });
}

}  // namespace pygraph::simulator
