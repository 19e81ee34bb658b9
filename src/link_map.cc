#include <iomanip>
#include <map>
#include <sstream>

#include "pygraph/link.h"

namespace pygraph {
namespace {

std::string symbol_name(const Symbol& symbol, size_t index) {
  switch (symbol.kind) {
    case SymbolKind::kInput:
      return "input" + std::to_string(symbol.slot);
    case SymbolKind::kOutput:
      return "output" + std::to_string(symbol.slot);
    case SymbolKind::kInternal:
      return "internal" + std::to_string(index);
    case SymbolKind::kRandom:
      break;
  }
  return "random" + std::to_string(symbol.slot);
}

std::string node_name(const Node& node) {
  switch (node.kind) {
    case NodeKind::kKernel:
      return node.name;
    case NodeKind::kMemcpy:
      return "(memcpy)";
    case NodeKind::kMemset:
      return "(memset)";
    case NodeKind::kChildGraph:
      return "(child graph)";
    case NodeKind::kEmpty:
      break;
  }
  return "(empty)";
}

std::string last_use(const Symbol& symbol) {
  return symbol.last == Allocation::kNever ? "end" : std::to_string(symbol.last);
}

std::string place_name(const LinkedGraph& linked, uint32_t region) {
  const uint32_t input = linked.regions[region - 1].input;
  if (input == Region::kOwnBlock) return " in block" + std::to_string(region);
  return " in input" + std::to_string(input);
}

}  // namespace

std::string link_map(const LinkedGraph& linked) {
  std::ostringstream out;
  out << linked.recording.nodes.size() << " nodes, " << linked.relocations.size()
      << " relocations, " << linked.symbols.size() << " symbols, workspace "
      << linked.workspace_size << " bytes, " << linked.noise_words << " words of noise, "
      << linked.unexplained_words << " unexplained\n\n"
      << std::left << std::setw(14) << "symbol" << std::setw(14) << "bytes" << std::setw(8)
      << "first" << std::setw(8) << "last"
      << "workspace\n";
  for (size_t i = 0; i < linked.symbols.size(); ++i) {
    const Symbol& symbol = linked.symbols[i];
    out << std::setw(14) << symbol_name(symbol, i) << std::setw(14) << symbol.size << std::setw(8)
        << symbol.first << std::setw(8) << last_use(symbol);
    if (symbol.kind == SymbolKind::kInternal) out << "+" << symbol.workspace_offset;
    if (symbol.region > 0) out << place_name(linked, symbol.region);
    if (symbol.kind == SymbolKind::kOutput && linked.donors[symbol.slot] != kNoDonor) {
      out << "takes the place of input" << linked.donors[symbol.slot];
    }
    out << "\n";
  }
  out << "\n"
      << std::setw(8) << "node" << std::setw(8) << "byte" << std::setw(26) << "address"
      << "kernel\n";
  for (const Relocation& relocation : linked.relocations) {
    const std::string target =
        symbol_name(linked.symbols[relocation.symbol], relocation.symbol) +
        (relocation.addend != 0 ? " + " + std::to_string(relocation.addend) : "");
    out << std::setw(8) << relocation.node << std::setw(8) << relocation.offset << std::setw(26)
        << target << node_name(linked.recording.nodes[relocation.node]) << "\n";
  }
  return out.str();
}

std::string to_dot(const LinkedGraph& linked) {
  std::map<uint32_t, std::string> uses;
  for (const Relocation& relocation : linked.relocations) {
    std::string& text = uses[relocation.node];
    text += "\\n" + std::to_string(relocation.offset) + ": " +
            symbol_name(linked.symbols[relocation.symbol], relocation.symbol);
  }
  std::ostringstream out;
  out << "digraph pygraph {\n  node [shape=box, fontname=monospace];\n";
  for (uint32_t n = 0; n < linked.recording.nodes.size(); ++n) {
    out << "  n" << n << " [label=\"" << n << " " << node_name(linked.recording.nodes[n]) << uses[n]
        << "\"];\n";
  }
  for (const Edge& edge : linked.recording.edges) {
    out << "  n" << edge.from << " -> n" << edge.to
        << (edge.data.type != 0 ? " [style=dashed]" : "") << ";\n";
  }
  out << "}\n";
  return out.str();
}

}  // namespace pygraph
