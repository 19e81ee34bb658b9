// Differential capture: which words of the parameter images are addresses, and of what?
//
// The computation was recorded twice with every input, output and internal allocation elsewhere. A
// word that is equal in both recordings is a constant (a size, a float, a weight's address). A word
// that differs is resolved, in each recording on its own, to the memory it points into; if both
// answers are the same symbol at the same distance, it is a relocation:
//
//     node 7, byte 16:   A  0x7f10'0000'0600  = input 2 + 0x200        relocation (7, 16, input 2,
//                        B  0x7f90'0000'1a00  = input 2 + 0x200                    addend 0x200)
//
// The allocator reuses memory, so an address alone does not name an allocation: at node 3 it may be
// an intermediate, at node 40 an output. Resolution therefore asks for the allocation alive at the
// node. Two fallbacks, tried in order, cover what real kernels do: an address one past the end of
// an allocation (end iterators), and one of an allocation already freed (stale bytes in padding).
//
// A differing word that is not explained is judged by its value in B, the graph that will run:
//
//     no device memory        noise: padding that nobody initialised; left alone
//     a stand-in address      unexplained: mostly padding too (large parameter structs are launched
//                             with whatever the stack held), but perhaps an address used in a way
//                             PyGraph does not know. Left alone: it points at a stand-in page,
//                             which is poisoned while the graph is verified, so a use of it shows
//     other device memory     unexplained in the same way: leftovers of the program's real tensors,
//                             or memory of a library. It is replaced by a stand-in address, so that
//                             a use of it shows just as well
#include <algorithm>
#include <cstring>
#include <optional>
#include <string>

#include "branches.h"
#include "plan_memory.h"
#include "pygraph/link.h"
#include "scratch.h"

namespace pygraph {
namespace {

constexpr uint64_t kRandomStateSize = 16;

uint64_t read_word(const Node& node, uint32_t offset) {
  uint64_t word = 0;
  std::memcpy(&word, node.image.data() + offset, sizeof word);
  return word;
}

struct Resolved {
  uint32_t symbol = 0;
  uint64_t addend = 0;
};

enum class Match : uint8_t { kAlive, kEndOfAlive, kFreed };

bool is_match(Match rule, const Symbol& symbol, uint32_t position, uint64_t distance) {
  const bool alive = symbol.first <= position && position < symbol.last;
  switch (rule) {
    case Match::kAlive:
      return alive && distance < symbol.size;
    case Match::kEndOfAlive:
      return alive && distance == symbol.size;
    case Match::kFreed:
      return symbol.last <= position && distance < symbol.size;
  }
  return false;
}

// The latest symbol that explains both words in the same way. (Random states have no address here,
// so they explain no words that differ.)
std::optional<Resolved> resolve(const std::vector<Symbol>& symbols, uint32_t position,
                                uint64_t word_a, uint64_t word_b) {
  for (const Match rule : {Match::kAlive, Match::kEndOfAlive, Match::kFreed}) {
    for (size_t i = symbols.size(); i-- > 0;) {
      const Symbol& symbol = symbols[i];
      const uint64_t distance = word_a - symbol.address_a;
      if (distance == word_b - symbol.address_b && is_match(rule, symbol, position, distance)) {
        return Resolved{static_cast<uint32_t>(i), distance};
      }
    }
  }
  return std::nullopt;
}

bool is_device_memory(const Driver& driver, uint64_t word) {
  unsigned type = 0;
  return driver.pointer_get_attribute(&type, abi::kPointerAttributeMemoryType, word) ==
             abi::kSuccess &&
         type == abi::kMemoryTypeDevice;
}

// The start of the largest stand-in memory, or 0: much room behind it for whoever follows it.
uint64_t stand_in_address(const Recording& recording) {
  uint64_t address = 0;
  uint64_t size = 0;
  const auto consider = [&](uint64_t other, uint64_t other_size) {
    if (!recording.address_space.contains(other) || other_size < size) return;
    address = other;
    size = other_size;
  };
  for (const Range& input : recording.inputs) consider(input.address, input.size);
  for (const Allocation& allocation : recording.allocations) {
    consider(allocation.address, allocation.size);
  }
  return address;
}

std::vector<Symbol> collect_symbols(const Recording& a, const Recording& b) {
  std::vector<Symbol> symbols;
  for (uint32_t slot = 0; slot < a.inputs.size(); ++slot) {
    symbols.push_back({SymbolKind::kInput, slot, a.inputs[slot].size, 0, Allocation::kNever,
                       a.inputs[slot].address, b.inputs[slot].address});
  }
  const size_t first_allocation = symbols.size();
  for (size_t i = 0; i < a.allocations.size(); ++i) {
    const Allocation& x = a.allocations[i];
    symbols.push_back(
        {SymbolKind::kInternal, 0, x.size, x.first, x.last, x.address, b.allocations[i].address});
  }
  for (uint32_t slot = 0; slot < a.outputs.size(); ++slot) {
    const auto is_backing = [&](const Symbol& s) {
      return s.last == Allocation::kNever && a.outputs[slot] - s.address_a < s.size &&
             a.outputs[slot] - s.address_a == b.outputs[slot] - s.address_b;
    };
    const auto it = std::find_if(symbols.begin() + static_cast<ptrdiff_t>(first_allocation),
                                 symbols.end(), is_backing);
    if (it == symbols.end()) {
      throw NotRelocatable("output " + std::to_string(slot) + " is not memory of this recording");
    }
    it->kind = SymbolKind::kOutput;
    it->slot = slot;
  }
  return symbols;
}

// Equal words that hold the addresses of a random generator's seed and offset, side by side.
std::optional<uint32_t> find_random_state(const Recording& recording, const Node& node,
                                          uint32_t offset) {
  if (node.kind != NodeKind::kKernel || offset + kRandomStateSize > node.image.size()) return {};
  for (uint32_t i = 0; i < recording.random.size(); ++i) {
    if (read_word(node, offset) == recording.random[i].seed_address &&
        read_word(node, offset + 8) == recording.random[i].offset_address) {
      return i;
    }
  }
  return {};
}

bool is_updatable(const Node& node) {
  if (node.kind == NodeKind::kMemcpy) {
    abi::Memcpy3D params{};
    std::memcpy(&params, node.image.data(), sizeof params);
    return params.height <= 1 && params.depth <= 1;
  }
  if (node.kind == NodeKind::kMemset) {
    abi::MemsetNodeParams params{};
    std::memcpy(&params, node.image.data(), sizeof params);
    return params.height <= 1;
  }
  return true;
}

// The final check: writing A's addresses through the relocations must turn B's images into A's,
// words left alone aside. Holds by construction; a failure would be an error of this file.
void check_closed(const Recording& a, const LinkedGraph& linked, uint32_t left_alone) {
  uint32_t unexplained = 0;
  size_t next = 0;
  for (uint32_t n = 0; n < a.nodes.size(); ++n) {
    for (const uint32_t offset : a.nodes[n].address_offsets()) {
      uint64_t word = read_word(linked.recording.nodes[n], offset);
      if (next < linked.relocations.size() && linked.relocations[next].node == n &&
          linked.relocations[next].offset == offset) {
        const Relocation& relocation = linked.relocations[next++];
        const Symbol& symbol = linked.symbols[relocation.symbol];
        if (symbol.kind != SymbolKind::kRandom) word = symbol.address_a + relocation.addend;
      }
      if (word != read_word(a.nodes[n], offset)) ++unexplained;
    }
  }
  if (unexplained != left_alone || next != linked.relocations.size()) {
    throw std::logic_error("scan_relocations left a word unclassified");
  }
}

}  // namespace

void scan_relocations(const Driver& driver, const Recording& a, LinkedGraph& linked) {
  const Recording& b = linked.recording;
  linked.symbols = collect_symbols(a, b);
  const auto first_random = static_cast<uint32_t>(linked.symbols.size());
  for (uint32_t i = 0; i < b.random.size(); ++i) {
    linked.symbols.push_back({SymbolKind::kRandom, i, kRandomStateSize});
  }

  const uint64_t diverted = stand_in_address(b);
  for (uint32_t n = 0; n < a.nodes.size(); ++n) {
    const Node& node_a = a.nodes[n];
    const Node& node_b = b.nodes[n];
    const size_t relocations_before = linked.relocations.size();
    bool diverts = false;
    for (const uint32_t offset : node_a.address_offsets()) {
      const uint64_t word_a = read_word(node_a, offset);
      const uint64_t word_b = read_word(node_b, offset);
      if (word_a == word_b) {
        if (const auto state = find_random_state(b, node_b, offset)) {
          linked.relocations.push_back({n, offset, first_random + *state, 0});
          linked.relocations.push_back({n, offset + 8, first_random + *state, 8});
        }
        continue;
      }
      if (const auto found = resolve(linked.symbols, node_a.position, word_a, word_b)) {
        linked.relocations.push_back({n, offset, found->symbol, found->addend});
      } else if (a.address_space.contains(word_b) || b.address_space.contains(word_b)) {
        ++linked.unexplained_words;
      } else if (is_device_memory(driver, word_b)) {
        std::memcpy(linked.recording.nodes[n].image.data() + offset, &diverted, sizeof diverted);
        ++linked.unexplained_words;
        diverts = true;
      } else {
        ++linked.noise_words;
      }
    }
    // Only nodes with relocations get their image written back.
    if (diverts && (diverted == 0 || linked.relocations.size() == relocations_before)) {
      throw NeedsFixedAddresses("node " + std::to_string(n) + ", kernel " + node_a.name +
                                ": an address among its parameters belongs to no known memory");
    }
    if (linked.relocations.size() > relocations_before && !is_updatable(node_b)) {
      throw NeedsFixedAddresses("node " + std::to_string(n) +
                                " is a copy or fill of more than one row, which cannot be updated");
    }
  }
  // From here on no relocation is added.
  check_closed(a, linked, linked.noise_words + linked.unexplained_words);
}

LinkedGraph link(const Driver& driver, const Recording& first, Recording second,
                 const MemoryOptions& memory, uint32_t lanes) {
  LinkedGraph linked;
  // The same computation? Throws if not.
  match_recordings(first, second);
  linked.recording = std::move(second);
  // Which words are addresses, and of what?
  scan_relocations(driver, first, linked);
  // What may run beside what?
  std::optional<Order> order = order_of_chain(linked.recording);
  if (order && lanes > 1) split_scratch(linked);
  std::optional<Branches> branches = order ? find_branches(linked, *order, lanes) : std::nullopt;
  if (branches) {
    linked.recording.edges = std::move(branches->edges);
    linked.lanes = branches->lanes;
    order = std::move(branches->order);
  }
  // Where does each internal allocation live? Layout is frozen from here.
  plan_memory(linked, memory, order);
  return linked;
}

}  // namespace pygraph
