#include "pygraph/bind_table.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace pygraph {
namespace {

constexpr size_t kImageAlignment = 128;  // TMA descriptors ask for 64, some kernels for 128
constexpr uint64_t kUnbound = ~uint64_t{0};
constexpr size_t kExtraLength = 5;  // pointer key, buffer, size key, size, end

size_t align_image(size_t size) {
  return (size + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
}

}  // namespace

BindTable::BindTable(const LinkedGraph& linked)
    : workspace_slot_(linked.recording.inputs.size() + linked.recording.outputs.size()),
      region_slot_(workspace_slot_ + 1 + linked.recording.random.size()),
      bound_(region_slot_ + linked.regions.size(), kUnbound) {
  lay_out_images(linked);
  sort_words(linked);
  dirty_.reserve(patched_nodes_.size());
}

void BindTable::lay_out_images(const LinkedGraph& linked) {
  size_t bytes = 0;
  size_t pointers = 0;
  size_t packed = 0;
  for (const Relocation& relocation : linked.relocations) {
    if (!patched_nodes_.empty() && patched_nodes_.back().node == relocation.node) continue;
    const Node& node = linked.recording.nodes[relocation.node];
    patched_nodes_.push_back({relocation.node, nullptr, {}, false});
    bytes += align_image(node.image.size());
    pointers += node.packed ? kExtraLength : node.params.size();
    packed += node.packed ? 1 : 0;
  }
  images_ = std::make_unique<std::byte[]>(bytes + kImageAlignment);
  param_pointers_.reserve(pointers);  // no reallocation below: addresses are kept
  packed_sizes_.reserve(packed);

  auto address = reinterpret_cast<uintptr_t>(images_.get());
  auto* next = images_.get() + (kImageAlignment - address % kImageAlignment) % kImageAlignment;
  for (PatchedNode& patch : patched_nodes_) {
    const Node& node = linked.recording.nodes[patch.node];
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

size_t BindTable::slot_of(const Symbol& symbol, const LinkedGraph& linked) const {
  switch (symbol.kind) {
    case SymbolKind::kInput:
      return symbol.slot;
    case SymbolKind::kOutput:
      return linked.recording.inputs.size() + symbol.slot;
    case SymbolKind::kInternal:
      return symbol.region == 0 ? workspace_slot_ : region_slot_ + symbol.region - 1;
    case SymbolKind::kRandom:
      break;
  }
  return workspace_slot_ + 1 + symbol.slot;
}

void BindTable::sort_words(const LinkedGraph& linked) {
  std::vector<std::pair<size_t, Word>> words;
  uint32_t patch = 0;
  for (const Relocation& relocation : linked.relocations) {
    while (patched_nodes_[patch].node != relocation.node) ++patch;
    const Symbol& symbol = linked.symbols[relocation.symbol];
    auto* value = reinterpret_cast<uint64_t*>(patched_nodes_[patch].image + relocation.offset);
    words.push_back(
        {slot_of(symbol, linked), {value, symbol.workspace_offset + relocation.addend, patch}});
  }
  std::stable_sort(words.begin(), words.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  begin_.assign(slot_count() + 1, 0);
  for (const auto& [slot, word] : words) {
    ++begin_[slot + 1];
    words_.push_back(word);
  }
  for (size_t slot = 0; slot < slot_count(); ++slot) begin_[slot + 1] += begin_[slot];
}

void BindTable::write(std::span<const uint64_t> addresses) {
  for (size_t slot = 0; slot < bound_.size(); ++slot) {
    const uint64_t address = addresses[slot];
    if (address == bound_[slot]) continue;
    bound_[slot] = address;
    for (const Word& word : words(slot)) {
      *word.value = address + word.addend;
      PatchedNode& patch = patched_nodes_[word.patch];
      if (patch.is_dirty) continue;
      patch.is_dirty = true;
      dirty_.push_back(word.patch);
    }
  }
}

void BindTable::clean() {
  for (const uint32_t index : dirty_) patched_nodes_[index].is_dirty = false;
  dirty_.clear();
}

}  // namespace pygraph
