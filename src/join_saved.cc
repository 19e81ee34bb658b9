#include "pygraph/join_saved.h"

#include <algorithm>
#include <functional>
#include <optional>

#include "output_placement.h"
#include "pack.h"
#include "pygraph/alignment.h"

namespace pygraph {
namespace {

// A block of more tensors, or of tensors that are further apart in the order of the forward, would
// stay allocated for too long.
constexpr size_t kMostJoined = 8;
constexpr size_t kMostSpanned = 16;

struct Saved {
  uint32_t index;
  uint64_t bytes;
};

// Takes out of both lists what belongs together where each gradient has one tensor for itself.
// `gradients` are the largest first, and take the largest that is not too large.
void pair_up(std::vector<Saved>& saved, std::vector<uint64_t>& gradients, IsCloseInSize is_close) {
  std::erase_if(gradients, [&](uint64_t gradient) {
    auto largest = saved.end();
    for (auto it = saved.begin(); it != saved.end(); ++it) {
      const bool fits = it->bytes >= gradient && is_close(it->bytes, gradient);
      if (fits && (largest == saved.end() || it->bytes > largest->bytes)) largest = it;
    }
    if (largest == saved.end()) return false;
    saved.erase(largest);
    return true;
  });
}

// Takes out tensors that several gradients fill.
void fill_with_several(std::vector<Saved>& saved, std::vector<uint64_t>& gradients) {
  std::erase_if(saved, [&](const Saved& tensor) {
    std::vector<uint64_t> left;
    uint64_t end = 0;
    for (const uint64_t gradient : gradients) {
      const bool fits = end + gradient <= tensor.bytes;
      if (fits) end += align_up(gradient);
      if (!fits) left.push_back(gradient);
    }
    if (!is_about_as_large(tensor.bytes, end)) return false;
    gradients = std::move(left);
    return true;
  });
}

// Positions [first, last).
struct Run {
  size_t first;
  size_t last;
  uint64_t bytes;
};

// A gradient keeps its block as long as it lives, and had exact memory without it.
constexpr bool is_close(uint64_t block, uint64_t gradient) {
  return block / 5 <= gradient / 4;
}

// The shortest row of tensors that one gradient fills; of equals, the first. Those that serve
// others may lie between them.
std::optional<Run> find_run(std::span<const Saved> saved, uint64_t gradient) {
  std::optional<Run> best;
  size_t first = 0;
  uint64_t offset = 0;  // of saved[i] in the block of [first, i]
  for (size_t i = 0; i < saved.size(); ++i) {
    const auto drop_first = [&] { offset -= align_up(saved[first++].bytes); };
    while (i - first >= kMostJoined || saved[i].index - saved[first].index >= kMostSpanned) {
      drop_first();
    }
    while (first < i && offset + saved[i].bytes - align_up(saved[first].bytes) >= gradient) {
      drop_first();
    }
    const uint64_t bytes = offset + saved[i].bytes;
    const bool fits = first < i && bytes >= gradient && bytes <= kLargestJoinedBlock;
    if (fits && is_close(bytes, gradient) && (!best || bytes < best->bytes)) {
      best = {first, i + 1, bytes};
    }
    if (best && best->bytes == gradient) break;
    offset += align_up(saved[i].bytes);
  }
  return best;
}

}  // namespace

std::vector<std::vector<uint32_t>> join_saved(std::span<const uint64_t> saved,
                                              std::vector<uint64_t> gradients) {
  std::vector<Saved> alone;
  for (uint32_t i = 0; i < saved.size(); ++i) {
    if (saved[i] >= kSmallestDonation) alone.push_back({i, saved[i]});
  }
  std::erase_if(gradients, [](uint64_t bytes) { return bytes < kSmallestDonation; });
  std::ranges::sort(gradients, std::greater());
  // What place_outputs() will do, as far as sizes tell.
  pair_up(alone, gradients, is_about_as_large);
  fill_with_several(alone, gradients);
  pair_up(alone, gradients, is_at_most_twice_as_large);

  std::vector<std::vector<uint32_t>> groups;
  uint64_t failed = 0;  // the last size for which there was no run
  for (const uint64_t gradient : gradients) {
    if (gradient > kLargestJoinedBlock || gradient == failed) continue;
    const auto run = find_run(alone, gradient);
    if (!run) {
      failed = gradient;
      continue;
    }
    const auto begin = alone.begin() + static_cast<std::ptrdiff_t>(run->first);
    const auto end = alone.begin() + static_cast<std::ptrdiff_t>(run->last);
    auto& group = groups.emplace_back();
    for (auto it = begin; it != end; ++it) group.push_back(it->index);
    alone.erase(begin, end);
  }
  return groups;
}

}  // namespace pygraph
