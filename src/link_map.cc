// Built from strings, not standard streams: these crashed in processes with PyTorch's CUDA build,
// whose libraries export parts of another libstdc++'s streams.
#include <algorithm>
#include <map>

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

std::string access_name(const Node& node, uint32_t offset) {
  if (!node.has_known_accesses) return "?";
  if (std::ranges::find(node.writes, offset) != node.writes.end()) return "w";
  return node.may_access(offset) ? "r" : "-";
}

// The nodes for which another one waits, by the latter.
std::string order_rows(const Recording& recording) {
  std::map<uint32_t, std::string> awaited;
  for (const Edge& edge : recording.edges) {
    awaited[edge.to] += " " + std::to_string(edge.from) + (edge.data == abi::EdgeData{} ? "" : "*");
  }
  std::string out = "node waits for (*: for its launch only)\n";
  for (const auto& [node, others] : awaited) out += std::to_string(node) + ":" + others + "\n";
  return out;
}

std::string padded(std::string text, size_t width) {
  text.resize(std::max(width, text.size()), ' ');
  return text;
}

std::string last_use(const Symbol& symbol) {
  return symbol.last == Allocation::kNever ? "end" : std::to_string(symbol.last);
}

std::string place_name(const LinkedGraph& linked, uint32_t number) {
  const Region& region = linked.regions[number - 1];
  if (region.input != Region::kOwnBlock) return " in input" + std::to_string(region.input);
  if (region.output != Region::kNoOutput) return " in output" + std::to_string(region.output);
  return " in block" + std::to_string(number);
}

std::string describe_place(const LinkedGraph& linked, const Symbol& symbol) {
  std::string text;
  if (symbol.kind == SymbolKind::kInternal) text += "+" + std::to_string(symbol.workspace_offset);
  if (symbol.region > 0) text += place_name(linked, symbol.region);
  if (symbol.kind == SymbolKind::kOutput && linked.placements[symbol.slot]) {
    const OutputPlacement& donor = linked.placements[symbol.slot];
    text += "takes the place of input" + std::to_string(donor.input);
    if (donor.offset > 0) text += "+" + std::to_string(donor.offset);
  }
  return text;
}

}  // namespace

std::string link_map(const LinkedGraph& linked) {
  std::string out = std::to_string(linked.recording.nodes.size()) + " nodes, " +
                    std::to_string(linked.relocations.size()) + " relocations, " +
                    std::to_string(linked.symbols.size()) + " symbols, workspace " +
                    std::to_string(linked.workspace_size) + " bytes, " +
                    std::to_string(linked.noise_words) + " words of noise, " +
                    std::to_string(linked.unexplained_words) + " unexplained\n\n";
  const auto symbol_row = [&](const std::string& name, const std::string& bytes,
                              const std::string& first, const std::string& last) {
    out += padded(name, 14) + padded(bytes, 14) + padded(first, 8) + padded(last, 8);
  };
  symbol_row("symbol", "bytes", "first", "last");
  out += "workspace\n";
  for (size_t i = 0; i < linked.symbols.size(); ++i) {
    const Symbol& symbol = linked.symbols[i];
    symbol_row(symbol_name(symbol, i), std::to_string(symbol.size), std::to_string(symbol.first),
               last_use(symbol));
    out += describe_place(linked, symbol) + "\n";
  }
  const auto relocation_row = [&](const std::string& node, const std::string& byte,
                                  const std::string& access, const std::string& address,
                                  const std::string& kernel) {
    out +=
        padded(node, 8) + padded(byte, 8) + padded(access, 8) + padded(address, 26) + kernel + "\n";
  };
  out += "\n";
  relocation_row("node", "byte", "access", "address", "kernel");
  for (const Relocation& relocation : linked.relocations) {
    const std::string target =
        symbol_name(linked.symbols[relocation.symbol], relocation.symbol) +
        (relocation.addend != 0 ? " + " + std::to_string(relocation.addend) : "");
    const Node& node = linked.recording.nodes[relocation.node];
    relocation_row(std::to_string(relocation.node), std::to_string(relocation.offset),
                   access_name(node, relocation.offset), target, node_name(node));
  }
  return out + "\n" + order_rows(linked.recording);
}

std::string to_dot(const LinkedGraph& linked) {
  std::map<uint32_t, std::string> uses;
  for (const Relocation& relocation : linked.relocations) {
    std::string& text = uses[relocation.node];
    text += "\\n" + std::to_string(relocation.offset) + ": " +
            symbol_name(linked.symbols[relocation.symbol], relocation.symbol);
  }
  std::string out = "digraph pygraph {\n  node [shape=box, fontname=monospace];\n";
  for (uint32_t n = 0; n < linked.recording.nodes.size(); ++n) {
    const std::string number = std::to_string(n);
    out.append("  n").append(number).append(" [label=\"").append(number).append(" ");
    out.append(node_name(linked.recording.nodes[n])).append(uses[n]).append("\"];\n");
  }
  for (const Edge& edge : linked.recording.edges) {
    out.append("  n").append(std::to_string(edge.from));
    out.append(" -> n").append(std::to_string(edge.to));
    out.append(edge.data.type != 0 ? " [style=dashed];\n" : ";\n");
  }
  return out + "}\n";
}

}  // namespace pygraph
