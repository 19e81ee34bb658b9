#include "pygraph/recording.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace pygraph {

std::vector<uint32_t> Node::address_offsets() const {
  switch (kind) {
    case NodeKind::kKernel: {
      // Any aligned word: struct parameters (TMA descriptors, tensor lists) hold addresses inside.
      std::vector<uint32_t> offsets;
      for (uint32_t offset = 0; offset + 8 <= image.size(); offset += 8) offsets.push_back(offset);
      return offsets;
    }
    case NodeKind::kMemcpy:
      return {offsetof(abi::Memcpy3D, src_device), offsetof(abi::Memcpy3D, dst_device)};
    case NodeKind::kMemset:
      return {offsetof(abi::MemsetNodeParams, dst)};
    case NodeKind::kChildGraph:
    case NodeKind::kEmpty:
      break;
  }
  return {};
}

uint64_t Node::word_at(uint32_t offset) const {
  uint64_t word = 0;
  std::memcpy(&word, image.data() + offset, sizeof word);
  return word;
}

bool Node::may_access(uint32_t offset) const {
  return !has_known_accesses || std::ranges::find(reads, offset) != reads.end() ||
         std::ranges::find(writes, offset) != writes.end();
}

bool Recording::is_scratch(uint64_t address, uint32_t last) const {
  return last == Allocation::kNever && std::ranges::find(scratch, address) != scratch.end();
}

namespace {

const Operator* find_operator(const std::vector<Operator>& operators, uint32_t position) {
  const auto found = std::ranges::partition_point(
      operators, [&](const Operator& op) { return op.last <= position; });
  return found != operators.end() && found->first <= position ? &*found : nullptr;
}

}  // namespace

const Operator* Recording::operator_of(const Node& node) const {
  return find_operator(operators, node.position);
}

const Operator* Recording::launcher_of(const Node& node) const {
  const Operator* inner = find_operator(inner_operators, node.position);
  return inner != nullptr ? inner : operator_of(node);
}

void AllocationLog::allocate(uint64_t address, uint64_t size, uint32_t node_count) {
  allocations_.push_back({address, size, node_count, Allocation::kNever});
}

void AllocationLog::free(uint64_t address, uint32_t node_count) {
  for (auto it = allocations_.rbegin(); it != allocations_.rend(); ++it) {
    if (it->address == address && it->last == Allocation::kNever) {
      it->last = node_count;
      return;
    }
  }
}

}  // namespace pygraph
