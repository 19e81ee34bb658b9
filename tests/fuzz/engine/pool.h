// An allocator over stand-in addresses that cuts and reuses pieces as PyTorch's does.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "pygraph/address_space.h"

namespace pygraph::fuzz {

class Pool {
 public:
  Pool(AddressSpace& space, uint32_t seed, bool has_gaps)
      : space_(space), random_(seed), has_gaps_(has_gaps) {}

  uint64_t allocate(uint64_t size) {
    const uint64_t wanted = (size + 511) / 512 * 512 + (has_gaps_ ? 512 * (1 + random_() % 4) : 0);
    auto best = free_.end();
    for (auto piece = free_.begin(); piece != free_.end(); ++piece) {
      const bool fits = piece->size >= wanted && (best == free_.end() || piece->size < best->size);
      if (fits) best = piece;
    }
    if (best == free_.end()) {
      const uint64_t chunk = std::max<uint64_t>(wanted, wanted < 65536 ? 131072 : 0);
      free_.push_back({space_.allocate(chunk, 0, AddressSpace::Content::kOther), chunk});
      best = free_.end() - 1;
    }
    const Range taken{best->address, wanted};
    if (best->size > wanted) {
      *best = {best->address + wanted, best->size - wanted};
    } else {
      free_.erase(best);
    }
    used_.push_back(taken);
    return taken.address;
  }

  void free(uint64_t address) {
    const auto used = std::ranges::find(used_, address, &Range::address);
    free_.push_back(*used);
    used_.erase(used);
  }

 private:
  AddressSpace& space_;
  std::mt19937 random_;
  bool has_gaps_;
  std::vector<Range> free_;
  std::vector<Range> used_;
};

}  // namespace pygraph::fuzz
