#include "hidden_uses.h"

#include <algorithm>

namespace pygraph {
namespace {

// Whether the operator was given memory of the symbol, or allocated it.
bool knows(const Operator& op, const Symbol& symbol) {
  if (symbol.kind == SymbolKind::kRandom) return false;
  const bool is_made_here =
      symbol.kind != SymbolKind::kInput && op.first <= symbol.first && symbol.first <= op.last;
  if (is_made_here) return true;
  if (symbol.first > op.first || op.first >= symbol.last) return false;  // not alive
  const Range memory{symbol.address_b, symbol.size};
  return std::ranges::any_of(op.arguments, [&](const Range& range) {
    return memory.contains(range.address) || range.contains(memory.address);
  });
}

// Some of PyTorch's own operators launch kernels on tables of addresses that an earlier kernel of
// the operator has written: grouped products, batched solvers. Until the operator ends, they may
// use all memory that any of its kernels was given.
void note_tables(const LinkedGraph& linked, std::vector<HiddenUse>& uses) {
  for (const Relocation& relocation : linked.relocations) {
    const Node& node = linked.recording.nodes[relocation.node];
    const Operator* op = operator_with_tables(linked.recording, node);
    if (op == nullptr) continue;
    HiddenUse& use = uses[relocation.symbol];
    use.begin = std::min(use.begin, op->first);
    use.end = std::max(use.end, op->last);
  }
}

// What others were given, each of their later kernels may use.
void note_kept_addresses(const LinkedGraph& linked, std::vector<HiddenUse>& uses) {
  const Recording& recording = linked.recording;
  uint32_t end = 0;
  for (const Node& node : recording.nodes) {
    if (may_take_addresses(recording, node)) end = std::max(end, node.position + 1);
  }
  const auto note = [&](uint32_t symbol, uint32_t begin) {
    if (begin >= end) return;
    uses[symbol].begin = std::min(uses[symbol].begin, begin);
    uses[symbol].end = std::max(uses[symbol].end, end);
  };
  for (const Relocation& relocation : linked.relocations) {
    const Node& node = recording.nodes[relocation.node];
    if (may_take_addresses(recording, node)) note(relocation.symbol, node.position);
  }
  for (const Operator& op : recording.operators) {
    if (!op.is_foreign) continue;
    for (uint32_t s = 0; s < linked.symbols.size(); ++s) {
      if (knows(op, linked.symbols[s])) note(s, op.first);
    }
  }
}

}  // namespace

bool may_take_addresses(const Recording& recording, const Node& node) {
  if (node.kind != NodeKind::kKernel || node.has_known_accesses) return false;
  const Operator* op = recording.operator_of(node);
  return op == nullptr || op->is_foreign;
}

const Operator* operator_with_tables(const Recording& recording, const Node& node) {
  if (node.kind != NodeKind::kKernel || node.has_known_accesses) return nullptr;
  const Operator* op = recording.operator_of(node);
  return op != nullptr && !op->is_foreign ? op : nullptr;
}

std::vector<HiddenUse> find_hidden_uses(const LinkedGraph& linked) {
  std::vector<HiddenUse> uses(linked.symbols.size());
  note_tables(linked, uses);
  note_kept_addresses(linked, uses);
  return uses;
}

}  // namespace pygraph
