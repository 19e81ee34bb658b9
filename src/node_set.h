// A set of a graph's top-level nodes, by position.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pygraph {

class NodeSet {
 public:
  explicit NodeSet(size_t count) : words_((count + 63) / 64) {}

  bool contains(uint32_t node) const { return (words_[node / 64] >> (node % 64) & 1) != 0; }
  bool contains(const NodeSet& other) const {
    for (size_t i = 0; i < words_.size(); ++i) {
      if ((other.words_[i] & ~words_[i]) != 0) return false;
    }
    return true;
  }
  // As contains(), of a set whose nodes are all in [first, last].
  bool contains(const NodeSet& other, uint32_t first, uint32_t last) const {
    for (size_t i = first / 64; i <= last / 64; ++i) {
      if ((other.words_[i] & ~words_[i]) != 0) return false;
    }
    return true;
  }
  void insert(uint32_t node) { words_[node / 64] |= uint64_t{1} << (node % 64); }
  void insert(const NodeSet& other) {
    for (size_t i = 0; i < words_.size(); ++i) words_[i] |= other.words_[i];
  }
  void keep_only(const NodeSet& other) {
    for (size_t i = 0; i < words_.size(); ++i) words_[i] &= other.words_[i];
  }
  // The smallest position that is not in the set.
  uint32_t first_missing() const {
    uint32_t position = 0;
    for (const uint64_t word : words_) {
      if (word != ~uint64_t{0}) return position + static_cast<uint32_t>(std::countr_one(word));
      position += 64;
    }
    return position;
  }

 private:
  std::vector<uint64_t> words_;
};

}  // namespace pygraph
