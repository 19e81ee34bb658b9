#include "pygraph/executable.h"

#include <algorithm>
#include <cstring>

namespace pygraph {
namespace {

constexpr size_t kImageAlignment = 128;  // TMA descriptors ask for 64, some kernels for 128
constexpr uint64_t kUnbound = ~uint64_t{0};
constexpr size_t kExtraLength = 5;  // pointer key, buffer, size key, size, end

size_t align_image(size_t size) {
  return (size + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
}

}  // namespace

ExecutableGraph::ExecutableGraph(const Driver& driver, Graph graph, LinkedGraph linked,
                                 Patching patching)
    : driver_(driver), patching_(patching), graph_(std::move(graph)), linked_(std::move(linked)) {
  PYGRAPH_CHECK(driver_, context_get_current(&context_));
  workspace_slot_ = linked_.recording.inputs.size() + linked_.recording.outputs.size();
  bound_.assign(region_slot() + linked_.regions.size(), kUnbound);
  lay_out_images();
  build_bind_table();
  is_dirty_.assign(patches_.size(), 0);
  is_changed_.assign(bound_.size(), 0);
  dirty_.reserve(patches_.size());
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

size_t ExecutableGraph::nodes_on_device() const {
  return static_cast<size_t>(std::ranges::count_if(patches_, &Patch::is_on_device));
}

uint64_t ExecutableGraph::device_bytes() const {
  const auto words = std::ranges::count_if(
      entries_, [&](const BindEntry& entry) { return patches_[entry.patch].is_on_device; });
  return static_cast<uint64_t>(words) * sizeof(DevicePatcher::Word);
}

void ExecutableGraph::lay_out_images() {
  size_t bytes = 0;
  size_t pointers = 0;
  size_t packed = 0;
  for (const Relocation& relocation : linked_.relocations) {
    if (!patches_.empty() && patches_.back().node == relocation.node) continue;
    const Node& node = linked_.recording.nodes[relocation.node];
    const bool is_on_device = node.kind == NodeKind::kKernel && node.parent < 0;
    patches_.push_back({relocation.node, is_on_device, nullptr, {}});
    bytes += align_image(node.image.size());
    pointers += node.packed ? kExtraLength : node.params.size();
    packed += node.packed ? 1 : 0;
  }
  images_ = std::make_unique<std::byte[]>(bytes + kImageAlignment);
  param_pointers_.reserve(pointers);  // no reallocation below: addresses are kept
  packed_sizes_.reserve(packed);

  auto address = reinterpret_cast<uintptr_t>(images_.get());
  auto* next = images_.get() + (kImageAlignment - address % kImageAlignment) % kImageAlignment;
  for (Patch& patch : patches_) {
    const Node& node = linked_.recording.nodes[patch.node];
    patch.image = next;
    std::memcpy(next, node.image.data(), node.image.size());
    next += align_image(node.image.size());
    if (node.kind != NodeKind::kKernel) continue;
    patch.params = {.func = node.function,
                    .grid = {node.grid[0], node.grid[1], node.grid[2]},
                    .block = {node.block[0], node.block[1], node.block[2]},
                    .shared_memory_bytes = node.shared_memory_bytes,
                    .kernel_params = nullptr,
                    .extra = nullptr,
                    .kern = node.kernel,
                    .ctx = node.context};
    const size_t first = param_pointers_.size();
    if (node.packed) {
      packed_sizes_.push_back(node.image.size());
      param_pointers_.insert(param_pointers_.end(), {abi::kLaunchParamBufferPointer, patch.image,
                                                     abi::kLaunchParamBufferSize,
                                                     &packed_sizes_.back(), abi::kLaunchParamEnd});
      patch.params.extra = param_pointers_.data() + first;
    } else {
      for (const Range& param : node.params) param_pointers_.push_back(patch.image + param.address);
      patch.params.kernel_params = param_pointers_.data() + first;
    }
  }
}

void ExecutableGraph::build_bind_table() {
  const auto slot_of = [&](const Symbol& symbol) -> size_t {
    switch (symbol.kind) {
      case SymbolKind::kInput:
        return symbol.slot;
      case SymbolKind::kOutput:
        return linked_.recording.inputs.size() + symbol.slot;
      case SymbolKind::kInternal:
        return symbol.region == 0 ? workspace_slot_ : region_slot() + symbol.region - 1;
      case SymbolKind::kRandom:
        break;
    }
    return workspace_slot_ + 1 + symbol.slot;
  };
  std::vector<std::pair<size_t, BindEntry>> table;
  uint32_t patch = 0;
  for (const Relocation& relocation : linked_.relocations) {
    while (patches_[patch].node != relocation.node) ++patch;
    const Symbol& symbol = linked_.symbols[relocation.symbol];
    auto* word = reinterpret_cast<uint64_t*>(patches_[patch].image + relocation.offset);
    table.push_back({slot_of(symbol), {word, symbol.workspace_offset + relocation.addend, patch}});
  }
  std::stable_sort(table.begin(), table.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  entry_begin_.assign(bound_.size() + 1, 0);
  for (const auto& [slot, entry] : table) {
    ++entry_begin_[slot + 1];
    entries_.push_back(entry);
  }
  for (size_t slot = 0; slot < bound_.size(); ++slot) entry_begin_[slot + 1] += entry_begin_[slot];
}

void ExecutableGraph::write_addresses(std::span<const uint64_t> addresses) {
  for (size_t slot = 0; slot < bound_.size(); ++slot) {
    const uint64_t address = addresses[slot];
    if (address == bound_[slot]) continue;
    bound_[slot] = address;
    is_changed_[slot] = 1;
    for (uint32_t i = entry_begin_[slot]; i < entry_begin_[slot + 1]; ++i) {
      const BindEntry& entry = entries_[i];
      *entry.word = address + entry.addend;
      if (is_dirty_[entry.patch] == 0) {
        is_dirty_[entry.patch] = 1;
        dirty_.push_back(entry.patch);
      }
    }
  }
}

void ExecutableGraph::apply_to_graph(const Patch& patch) {
  const Node& node = linked_.recording.nodes[patch.node];
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

void ExecutableGraph::apply_to_executable(const Patch& patch) {
  const Node& node = linked_.recording.nodes[patch.node];
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
  for (const Patch& patch : patches_) apply_to_graph(patch);
  CUgraphExec raw = nullptr;
  abi::InstantiateParams params{};
  PYGRAPH_CHECK(driver_, graph_instantiate(&raw, graph_.get(), &params));
  exec_ = GraphExec(driver_, raw);
  is_first_launch_ = true;
}

// The words in the order of entries_, those of other nodes left out.
void ExecutableGraph::make_patcher() {
  std::vector<void*> handles(patches_.size());
  for (size_t i = 0; i < patches_.size(); ++i) {
    if (!patches_[i].is_on_device) continue;
    abi::LaunchAttributeValue value{};
    value.device_updatable.is_updatable = 1;
    PYGRAPH_CHECK(driver_,
                  graph_kernel_set_attribute(linked_.recording.nodes[patches_[i].node].handle,
                                             abi::kLaunchAttributeDeviceUpdatable, &value));
    handles[i] = value.device_updatable.node;
  }
  std::vector<DevicePatcher::Word> words;
  word_begin_.assign(1, 0);
  for (size_t slot = 0; slot < bound_.size(); ++slot) {
    for (uint32_t i = entry_begin_[slot]; i < entry_begin_[slot + 1]; ++i) {
      const auto& [word, addend, patch] = entries_[i];
      if (!patches_[patch].is_on_device) continue;
      const auto offset = reinterpret_cast<std::byte*>(word) - patches_[patch].image;
      words.push_back({handles[patch], static_cast<uint64_t>(offset), addend});
    }
    word_begin_.push_back(static_cast<uint32_t>(words.size()));
  }
  patcher_ = std::make_unique<DevicePatcher>(driver_, words);
}

void ExecutableGraph::patch_on_device(CUstream stream) {
  if (is_first_launch_) {
    // It has all addresses already. Each is written once more, to see that the device does so.
    PYGRAPH_CHECK(driver_, graph_upload(exec_.get(), stream));
    std::ranges::fill(is_changed_, 1);
  }
  std::vector<DevicePatcher::Change> changes;
  for (size_t slot = 0; slot < bound_.size(); ++slot) {
    if (is_changed_[slot] == 0 || word_begin_[slot] == word_begin_[slot + 1]) continue;
    changes.push_back({bound_[slot], word_begin_[slot], word_begin_[slot + 1]});
  }
  patcher_->patch(stream, changes);
  if (is_first_launch_) patcher_->confirm(stream);
}

size_t ExecutableGraph::bind(std::span<const uint64_t> addresses) {
  if (addresses.size() != bound_.size()) throw std::logic_error("bind: wrong number of addresses");
  write_addresses(addresses);
  const size_t touched = dirty_.size();
  for (const uint32_t index : dirty_) is_dirty_[index] = 0;
  try {
    if (!exec_) {
      if (patching_ == Patching::kDevice && patcher_ == nullptr) make_patcher();
      instantiate();
    } else {
      for (const uint32_t index : dirty_) {
        const bool is_left = patching_ == Patching::kDevice && patches_[index].is_on_device;
        if (!is_left) apply_to_executable(patches_[index]);
      }
      apply_child_graphs();
    }
  } catch (...) {
    // Some nodes have new addresses, some have old ones: never launch that.
    exec_.reset();
    dirty_.clear();
    dirty_children_.clear();
    throw;
  }
  dirty_.clear();
  return touched;
}

void ExecutableGraph::launch(CUstream stream) {
  if (!exec_) throw std::logic_error("launch before a successful bind");
  if (patching_ == Patching::kHost) {
    PYGRAPH_CHECK(driver_, graph_launch(exec_.get(), stream));
    return;
  }
  try {
    patch_on_device(stream);
    PYGRAPH_CHECK(driver_, graph_launch(exec_.get(), stream));
  } catch (...) {
    exec_.reset();  // some nodes may have new addresses, some old ones
    throw;
  }
  is_first_launch_ = false;
  std::ranges::fill(is_changed_, 0);
}

}  // namespace pygraph
