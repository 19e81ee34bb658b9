#include "pygraph/written_inputs.h"

#include <algorithm>
#include <cstddef>

namespace pygraph {
namespace {

// Also the address past its end, from which a kernel may count backwards. (Nothing else begins
// there while recording.)
bool leads_to(uint64_t address, const Range& input) {
  return address - input.address <= input.size;
}

bool overlap(const Range& a, const Range& b) {
  return a.contains(b.address) || b.contains(a.address);
}

// The offsets of addresses that the node may write to. Those of an operator of the framework's own
// are the operator's to tell.
std::vector<uint32_t> written_words(const Recording& recording, const Node& node) {
  const Operator* op = recording.operator_of(node);
  if (op != nullptr && !op->is_foreign) return {};
  if (node.kind == NodeKind::kMemcpy) return {offsetof(abi::Memcpy3D, dst_device)};
  if (node.kind == NodeKind::kKernel && node.has_known_accesses) return node.writes;
  return node.address_offsets();
}

}  // namespace

std::vector<uint32_t> written_inputs(const Recording& recording) {
  std::vector<bool> is_written(recording.inputs.size());
  for (const Operator& op : recording.operators) {
    for (uint32_t slot = 0; slot < is_written.size(); ++slot) {
      const Range& input = recording.inputs[slot];
      const auto is_meant = [&](const Range& range) { return overlap(range, input); };
      if (std::ranges::any_of(op.writes, is_meant)) is_written[slot] = true;
    }
  }
  for (const Node& node : recording.nodes) {
    for (const uint32_t offset : written_words(recording, node)) {
      const uint64_t word = node.word_at(offset);
      if (!recording.address_space.contains(word)) continue;
      for (uint32_t slot = 0; slot < is_written.size(); ++slot) {
        if (leads_to(word, recording.inputs[slot])) is_written[slot] = true;
      }
    }
  }
  std::vector<uint32_t> slots;
  for (uint32_t slot = 0; slot < is_written.size(); ++slot) {
    if (is_written[slot]) slots.push_back(slot);
  }
  return slots;
}

}  // namespace pygraph
