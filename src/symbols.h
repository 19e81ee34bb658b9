// The symbols of two recordings, and which of them a pair of words points into.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "pygraph/link.h"

namespace pygraph {

// Inputs, then allocations (outputs among them), then random states, each in the order of the
// recordings. Throws NotRelocatable where an output is no allocation of its own.
std::vector<Symbol> collect_symbols(const Recording& a, const Recording& b);

// The rules by which a word may point to memory, depending on the memory's lifetime and the word's
// node.
enum class Match : uint8_t { kAlive, kJustFreed, kEndOfAlive, kFreed };

// A word's symbol, and how far into it the word points.
struct Resolved {
  uint32_t symbol = 0;
  uint64_t addend = 0;
};

// The latest symbol that explains both words in the same way. (Random states have no address here,
// so they explain no words that differ.)
std::optional<Resolved> resolve(const std::vector<Symbol>& symbols, uint32_t position,
                                uint64_t word_a, uint64_t word_b, Match rule);

// Which random generator's state the words at `offset` and behind it are: the addresses of its seed
// and its offset, side by side, each in its recording. (One by itself may be the end of other
// memory.)
std::optional<uint32_t> find_random_state(const Recording& a, const Recording& b,
                                          const Node& node_a, const Node& node_b, uint32_t offset);

}  // namespace pygraph
