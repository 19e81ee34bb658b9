// Differential capture: finds the words of the parameter images that are addresses, and their
// symbols.
//
// The computation was recorded twice, with every input, output and internal allocation at another
// address. A word that is equal in both recordings is a constant (a size, a float, a weight's
// address). A word that differs is resolved, in each recording on its own, to the memory it points
// into; if both answers are the same symbol at the same distance, it is a relocation:
//
//     node 7, byte 16:   A  0x7f10'0000'0600  = input 2 + 0x200        relocation (7, 16, input 2,
//                        B  0x7f90'0000'1a00  = input 2 + 0x200                    addend 0x200)
//
// The allocator reuses memory, so an address alone does not name an allocation: at node 3 it may be
// an intermediate, at node 40 an output. Resolution therefore asks for the allocation alive at the
// node. Fallbacks, tried in order, cover real kernels: an address one past the end of an allocation
// (end iterators), or in an allocation that was freed since the last launch, or in one that was
// freed earlier (leftovers in padding).
//
// A constant that is an address must belong to memory that stays valid (constants.h).
//
// PyTorch keeps seed and offset of a generator in memory of its own: until release 2.12 in the same
// one for all captures, since then in memory of each capture. Kernels have their addresses, which
// are known (Recording::random), side by side. They become relocations in any case.
//
// A word that differs and belongs to no symbol is refused if it is certainly used: if it is the
// address of a copy or fill, or a parameter of its own, unless one of PyTorch's own operators
// launched the kernel. (Those have functors of 8 bytes and less, part of which is padding.) If the
// word may be padding, its value in B, the graph that will run, decides:
//
//     no device memory        refused if it is computed from addresses (computed_numbers.h). Else
//                             noise: uninitialised padding; left alone
//     a stand-in address      unexplained: mostly padding too (large parameter structs are launched
//                             with whatever the stack held), but perhaps an address used in a way
//                             PyGraph does not know. Left alone: it points at a stand-in page,
//                             which is poisoned while the graph is verified, so a use of it shows
//     other device memory     an operator of PyTorch's own uses the tensors that it was given. If
//                             the memory is the allocator's, and neither they nor a workspace of a
//                             library lie there, it is a leftover of the program's real tensors,
//                             left alone. In any other kernel it may be used, and is refused
//
// The last rule also holds for constants in memory that may not stay valid. Such words are never
// changed, not even to test whether a kernel uses them: one may be half number, half leftover. The
// upper bound of a clamp, 9.0f, beside the upper half of a pointer from the stack looks like an
// address, and a graph with another bound is right until a value exceeds it.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "computed_numbers.h"
#include "pygraph/link.h"
#include "symbols.h"
#include "word_use.h"

namespace pygraph {
namespace {

constexpr const char* kDiffers =
    "has a parameter that differs between the recordings, and is no address";

std::string name_of(const Recording& recording, uint32_t index) {
  const Node& node = recording.nodes[index];
  const Operator* op = recording.operator_of(node);
  std::string text = op == nullptr ? "" : "operator " + op->name + ", ";
  text += "node " + std::to_string(index);
  if (node.kind == NodeKind::kKernel) return text + ", kernel " + node.name;
  return text + (node.kind == NodeKind::kMemcpy ? ", a copy" : ", a fill");
}

bool is_device_memory(const Driver& driver, uint64_t word) {
  unsigned type = 0;
  return driver.pointer_get_attribute(&type, abi::kPointerAttributeMemoryType, word) ==
             abi::kSuccess &&
         type == abi::kMemoryTypeDevice;
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
// except for words that are left alone. Holds by construction; a failure would be an error in this
// file.
void check_closed(const Recording& a, const LinkedGraph& linked, uint32_t left_alone) {
  uint32_t unexplained = 0;
  size_t next = 0;
  for (uint32_t n = 0; n < a.nodes.size(); ++n) {
    for (const uint32_t offset : a.nodes[n].address_offsets()) {
      uint64_t word = linked.recording.nodes[n].word_at(offset);
      if (next < linked.relocations.size() && linked.relocations[next].node == n &&
          linked.relocations[next].offset == offset) {
        const Relocation& relocation = linked.relocations[next++];
        const Symbol& symbol = linked.symbols[relocation.symbol];
        if (symbol.kind == SymbolKind::kRandom) continue;  // it has no address
        word = symbol.address_a + relocation.addend;
      }
      if (word != a.nodes[n].word_at(offset)) ++unexplained;
    }
  }
  if (unexplained != left_alone || next != linked.relocations.size()) {
    throw std::logic_error("scan_relocations left a word unclassified");
  }
}

// One scan: goes through the recordings' nodes, side by side.
class Scan {
 public:
  Scan(const Driver& driver, const Recording& a, LinkedGraph& linked,
       const Surroundings& surroundings)
      : driver_(driver),
        a_(a),
        linked_(linked),
        b_(linked.recording),
        workspaces_(surroundings.workspaces),
        owners_(driver, surroundings),
        displacements_(linked.symbols) {}

  void run(uint32_t first_random) {
    first_random_ = first_random;
    for (index_ = 0; index_ < a_.nodes.size(); ++index_) scan_node();
    for (const uint32_t symbol : used_when_freed_) ++linked_.symbols[symbol].last;
    // From here on no relocation is added.
    check_closed(a_, linked_, linked_.noise_words + linked_.unexplained_words - equal_words_);
  }

 private:
  using Owner = ConstantOwners::Owner;

  const Node& node_a() const { return a_.nodes[index_]; }
  const Node& node_b() const { return b_.nodes[index_]; }

  [[noreturn]] void refuse(const std::string& reason) const {
    throw NotRelocatable(name_of(b_, index_) + " " + reason);
  }

  void scan_node() {
    const size_t relocations_before = linked_.relocations.size();
    has_leftover_ = false;
    noise_.clear();
    random_until_ = 0;
    layout_ = parameter_layout(driver_, node_b());
    may_hold_garbage_ = node_b().kind == NodeKind::kKernel && launched_by_pytorch();
    if (!may_hold_garbage_ && have_other_numbers(node_a(), node_b(), layout_)) refuse(kDiffers);
    if (node_b().kind == NodeKind::kMemcpy) scan_copy();
    for (const uint32_t offset : node_a().address_offsets()) {
      if (!is_unused_end(offset)) scan_word(offset);
    }
    const bool is_relocated = linked_.relocations.size() > relocations_before;
    check_noise(relocations_before);
    if (has_leftover_ && !is_relocated) {  // the kernel has no other address to work on
      refuse("has an address among its parameters that belongs to no known memory");
    }
    if (is_relocated && !is_updatable(node_b())) {
      refuse("is a copy or fill of more than one row, which cannot be updated");
    }
  }

  // PyTorch's own operators give kernels no counters, no differences of addresses, and no other
  // numbers that differ from launch to launch: a word that differs is an address, or padding. In
  // other kernels it may be a number that the kernel uses. A custom operator may give such numbers
  // to PyTorch's own; what torch.compile reports ("Torch-Compiled Region", CompiledFunction) does
  // not.
  bool launched_by_pytorch() const {
    const Operator* op = b_.launcher_of(node_b());
    return op != nullptr && !op->is_foreign && !op->is_called_by_custom;
  }

  bool is_device_address(uint64_t word) const {
    return a_.address_space.contains(word) || b_.address_space.contains(word) ||
           is_device_memory(driver_, word);
  }

  // Of a copy: its source and destination on the host, which match_recordings() has found equal.
  void scan_copy() {
    abi::Memcpy3D params{};
    std::memcpy(&params, node_b().image.data(), sizeof params);
    ends_ = {params.src_memory_type, params.dst_memory_type};
    const std::array hosts = {reinterpret_cast<uint64_t>(params.src_host),
                              reinterpret_cast<uint64_t>(params.dst_host)};
    for (size_t end = 0; end < ends_.size(); ++end) {
      if (ends_[end] == abi::kMemoryTypeArray) refuse("copies an array");
      if (ends_[end] == abi::kMemoryTypeHost) judge_constant(hosts[end], WordUse::kUsed);
    }
  }

  bool is_unused_end(uint32_t offset) const {
    if (node_b().kind != NodeKind::kMemcpy) return false;
    return ends_[offset == offsetof(abi::Memcpy3D, src_device) ? 0 : 1] == abi::kMemoryTypeHost;
  }

  void scan_word(uint32_t offset) {
    const uint64_t word_a = node_a().word_at(offset);
    const uint64_t word_b = node_b().word_at(offset);
    const WordUse use = use_of_word(node_b(), layout_, offset);
    if (use == WordUse::kNumber) {
      // Padding, or half a word of a larger parameter: what may be an address has been looked at.
      if (word_a != word_b) ++linked_.noise_words;
      return;
    }
    if (offset < random_until_) return;
    if (const auto state = find_random_state(a_, b_, node_a(), node_b(), offset)) {
      linked_.relocations.push_back({index_, offset, first_random_ + *state, 0});
      linked_.relocations.push_back({index_, offset + 8, first_random_ + *state, 8});
      random_until_ = offset + static_cast<uint32_t>(kRandomStateSize);
    } else if (word_a == word_b) {
      const Owner owner = judge_constant(word_b, use);
      if (owner == Owner::kHeld || owner == Owner::kForeign) note_other_memory(offset);
    } else if (const auto found = explain(word_a, word_b, use)) {
      linked_.relocations.push_back({index_, offset, found->symbol, found->addend});
    } else if (use == WordUse::kUsed && !may_hold_garbage_) {
      refuse(kDiffers);
    } else if (use == WordUse::kUsed && is_device_address(word_b)) {
      refuse("has an address among its parameters that belongs to no known memory");
    } else if (a_.address_space.contains(word_b) || b_.address_space.contains(word_b)) {
      ++linked_.unexplained_words;
    } else if (is_device_memory(driver_, word_b)) {
      judge_other_memory(word_b);
    } else {
      ++linked_.noise_words;
      noise_.push_back({offset, word_a, word_b});
    }
  }

  // A kernel may use memory that was freed just before its launch, which stream order makes safe.
  // Such memory lives until the kernel ends. PyTorch's own operators free nothing there: what
  // is only perhaps an address of theirs is a leftover.
  std::optional<Resolved> explain(uint64_t word_a, uint64_t word_b, WordUse use) {
    const auto by = [&](Match rule) {
      return resolve(linked_.symbols, node_a().position, word_a, word_b, rule);
    };
    if (const auto alive = by(Match::kAlive)) return alive;
    const auto end = by(Match::kEndOfAlive);
    const auto freed = by(Match::kJustFreed);
    if (end && freed && use == WordUse::kUsed) {
      refuse("uses the end of some memory, or other memory that has just been freed");
    }
    if (end) return end;
    if (freed && (use == WordUse::kUsed || !may_hold_garbage_)) {
      used_when_freed_.insert(freed->symbol);
    }
    if (freed) return freed;
    return by(Match::kFreed);
  }

  Owner judge_constant(uint64_t word, WordUse use) {
    const bool is_copy = node_b().kind != NodeKind::kKernel;
    const ConstantOwners::Answer answer = owners_.of(word);
    if (answer.owner == Owner::kStandIn) refuse("uses memory that it kept from a recording");
    if (a_.address_space.contains(word) || b_.address_space.contains(word)) {
      if (use == WordUse::kUsed) refuse("uses an address that it kept from a recording");
      ++linked_.unexplained_words;
      ++equal_words_;
      return Owner::kNone;
    }
    switch (answer.owner) {
      case Owner::kNone:
        if (is_copy) refuse("uses memory of the host that the graph does not hold");
        break;
      case Owner::kHeld:
        break;
      case Owner::kForeign:
        add_foreign(answer.memory);
        break;
      case Owner::kHost:
        doubt("uses memory of the host that the graph does not hold", word, use);
        break;
      case Owner::kCached:
        doubt("uses memory that is no argument of its own and may be freed", word, use);
        break;
      case Owner::kStandIn:
        break;
    }
    return answer.owner;
  }

  void note_other_memory(uint32_t offset) {
    const Node& node = node_b();
    if (!node.has_known_accesses) return;
    const bool reads = std::ranges::find(node.reads, offset) != node.reads.end();
    linked_.uses_of_other_memory.push_back({index_, node.may_access(offset), !reads});
  }

  void add_foreign(ForeignMemory memory) {
    const auto& known = linked_.foreign;
    if (std::ranges::find(known, memory.number, &ForeignMemory::number) != known.end()) return;
    memory.user = name_of(b_, index_);
    linked_.foreign.push_back(std::move(memory));
  }

  // Judges a constant address of memory that may not stay valid. Refused, unless it must be a
  // leftover.
  void doubt(const std::string& reason, uint64_t word, WordUse use) {
    if (use == WordUse::kUsed) refuse(reason);
    leave_alone(word, reason);
    ++equal_words_;
  }

  // A word in a larger parameter that differs, and points at device memory that belongs to no
  // symbol: memory of the program's tensors, or of a library that has other memory in each call.
  void judge_other_memory(uint64_t word) {
    constexpr const char* kReason =
        "has an address among its parameters that belongs to no known memory";
    const Owner owner = owners_.of(word).owner;
    if (owner != Owner::kCached && owner != Owner::kHeld) refuse(kReason);
    leave_alone(word, kReason);
  }

  // Accepts a word in a larger parameter as a leftover, or refuses it.
  void leave_alone(uint64_t word, const std::string& reason) {
    const Operator* op = b_.launcher_of(node_b());
    const auto is_there = [&](const Range& memory) { return word - memory.address <= memory.size; };
    // Libraries leave the workspace of a stream on the stack, too.
    const bool is_leftover = op != nullptr && !op->is_foreign &&
                             std::ranges::none_of(op->arguments, is_there) &&
                             !(op->is_on_side_stream && std::ranges::any_of(workspaces_, is_there));
    if (!is_leftover) refuse(reason);
    has_leftover_ = true;
    ++linked_.noise_words;
  }

  // `first`: the node's first relocation.
  void check_noise(size_t first) {
    std::vector<uint32_t> used;  // empty: small numbers in padding are like differences
    for (size_t i = first; !may_hold_garbage_ && i < linked_.relocations.size(); ++i) {
      const uint32_t symbol = linked_.relocations[i].symbol;
      if (std::ranges::find(used, symbol) == used.end()) used.push_back(symbol);
    }
    for (const Number& number : noise_) {
      if (!displacements_.explain(number, used)) continue;
      refuse("has a number among its parameters that is computed from addresses" +
             describe(number));
    }
  }

  const Driver& driver_;
  const Recording& a_;
  LinkedGraph& linked_;
  const Recording& b_;
  const std::vector<Range>& workspaces_;
  ConstantOwners owners_;
  Displacements displacements_;
  uint32_t first_random_ = 0;
  uint32_t equal_words_ = 0;            // of the unexplained ones: equal in both recordings
  std::set<uint32_t> used_when_freed_;  // symbols that the node behind their end uses
  // Of the current node.
  uint32_t index_ = 0;
  bool has_leftover_ = false;
  uint32_t random_until_ = 0;
  std::array<int, 2> ends_{};  // of a copy: the types of memory
  std::vector<Range> layout_;
  bool may_hold_garbage_ = false;  // in its short parameters
  std::vector<Number> noise_;
};

}  // namespace

void scan_relocations(const Driver& driver, const Recording& a, LinkedGraph& linked,
                      const Surroundings& surroundings) {
  linked.symbols = collect_symbols(a, linked.recording);
  const auto first_random = linked.symbols.size() - linked.recording.random.size();
  Scan(driver, a, linked, surroundings).run(static_cast<uint32_t>(first_random));
}

}  // namespace pygraph
