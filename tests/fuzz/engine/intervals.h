// Which bytes of a value were written.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace pygraph::fuzz {

class Intervals {
 public:
  void add(uint64_t begin, uint64_t end) {
    std::vector<std::pair<uint64_t, uint64_t>> kept;
    for (const auto& [first, last] : ranges_) {
      if (last < begin || end < first) {
        kept.emplace_back(first, last);
      } else {
        begin = std::min(begin, first);
        end = std::max(end, last);
      }
    }
    kept.emplace_back(begin, end);
    std::ranges::sort(kept);
    ranges_ = std::move(kept);
  }
  bool contain(uint64_t begin, uint64_t end) const {
    return std::ranges::any_of(
        ranges_, [&](const auto& range) { return range.first <= begin && end <= range.second; });
  }
  void clear() { ranges_.clear(); }
  const std::vector<std::pair<uint64_t, uint64_t>>& ranges() const { return ranges_; }

 private:
  std::vector<std::pair<uint64_t, uint64_t>> ranges_;  // sorted, apart from each other
};

}  // namespace pygraph::fuzz
