#include "pygraph/address_space.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <span>

#include "pygraph/alignment.h"
#include "pygraph/handles.h"

namespace pygraph {
namespace {

constexpr uint64_t kNanPattern = ~uint64_t{0};  // NaN in every IEEE format and in bfloat16
constexpr uint64_t kSmallIntegers = 1;          // int64 1; int32 1, 0
constexpr int kReadWrite = 3;
constexpr uint64_t kMostGaps = 128;  // of 512 bytes
constexpr uint64_t kFirstGap = 89;   // of 512 bytes, where gaps are irregular

// A larger page saves mappings (some 80 us each), and takes time to fill and to check (0.2 ms per
// MiB and replay on an H200). So a region gets one when this much of it is mapped. The smallest
// first; the sizes are multiples of every granularity.
struct LargerPage {
  uint64_t size;
  uint64_t when_mapped;
};
constexpr std::array<LargerPage, 2> kLargerPages = {{
    {.size = uint64_t{8} << 20, .when_mapped = uint64_t{64} << 20},
    {.size = uint64_t{32} << 20, .when_mapped = uint64_t{4} << 30},
}};

abi::MemoryAllocationProperties page_properties(int device) {
  abi::MemoryAllocationProperties properties{};
  properties.type = 1;  // pinned, the only type
  properties.location = {.type = 1, .id = device};
  return properties;
}

// Where the first allocation of a half lies. Two spaces are a round number of bytes apart, because
// each is reserved as a whole. Without this, garbage that differs by a round number would look like
// an address in both.
uint64_t irregular_start(uint64_t half, uint64_t granularity) {
  return half / granularity * 5 / 128 * granularity;
}

// Host memory through which the content of pages is copied, piece by piece. Pinned, because
// copies from and to pageable memory take several times as long, and verification makes several
// of them per graph; pageable if there is no pinned memory. One piece for the process, never freed.
class Staging {
 public:
  explicit Staging(const Driver& driver) : lock_(mutex()) {
    static void* pinned = nullptr;
    if (pinned == nullptr) {
      const RelaxedCaptureMode relaxed(driver);
      if (driver.memory_allocate_host(&pinned, kBytes, kPortable) != abi::kSuccess) {
        pinned = nullptr;
      }
    }
    if (pinned == nullptr) pageable_.resize(kWords);
    words_ = {pinned != nullptr ? static_cast<uint64_t*>(pinned) : pageable_.data(), kWords};
  }
  // Calls `function` for each piece of the page, with its address and as many words of this memory.
  template <typename Function>
  void for_each_piece(uint64_t address, uint64_t size, Function&& function) const {
    for (uint64_t offset = 0; offset < size; offset += kBytes) {
      const uint64_t bytes = std::min(kBytes, size - offset);
      function(address + offset, words_.first(bytes / sizeof(uint64_t)));
    }
  }
  std::span<uint64_t> words() const { return words_; }

 private:
  static constexpr uint64_t kBytes = uint64_t{2} << 20;
  static constexpr size_t kWords = kBytes / sizeof(uint64_t);
  static constexpr unsigned kPortable = 1;  // CU_MEMHOSTALLOC_PORTABLE: for all devices
  static std::mutex& mutex() {
    static std::mutex instance;
    return instance;
  }
  std::lock_guard<std::mutex> lock_;
  std::vector<uint64_t> pageable_;
  std::span<uint64_t> words_;
};

}  // namespace

AddressSpace::AddressSpace(const Driver& driver, int device, uint64_t capacity, uint64_t gap)
    : driver_(driver), device_(device), capacity_(capacity), gap_(gap) {
  const abi::MemoryAllocationProperties properties = page_properties(device);
  size_t granularity = 0;
  PYGRAPH_CHECK(driver_, memory_get_granularity(&granularity, &properties, /*minimum=*/0));
  capacity_ = capacity / (2 * granularity) * (2 * granularity);
  abi::DevicePointer base = 0;
  PYGRAPH_CHECK(driver_, address_reserve(&base, capacity_, 0, 0, 0));
  base_ = base;
  try {
    for (const uint64_t poison : {kNanPattern, kSmallIntegers}) {
      Page page{.size = granularity};
      PYGRAPH_CHECK(driver_, memory_create(&page.handle, page.size, &properties, 0));
      const uint64_t half = capacity_ / 2;
      uint64_t begin = base_ + regions_.size() * half;
      const uint64_t end = begin + half;
      if (gap_ == kIrregularGaps) begin += irregular_start(half, granularity);
      const uint64_t first =
          begin + (gap_ == kIrregularGaps ? kFirstGap * kAllocationAlignment : 0);
      regions_.push_back(
          {begin, end, first, begin, {page}, kLargerPages[0].when_mapped, {}, poison});
    }
  } catch (...) {
    release();
    throw;
  }
}

AddressSpace::~AddressSpace() {
  release();
}

void AddressSpace::release() noexcept {
  for (const Region& region : regions_) {
    if (region.mapped > region.begin) {
      driver_.memory_unmap(region.begin, region.mapped - region.begin);
    }
    for (const Page& page : region.pages) driver_.memory_release(page.handle);
  }
  driver_.address_free(base_, capacity_);
}

uint64_t AddressSpace::mapped_bytes() const {
  uint64_t bytes = 0;
  for (const Region& region : regions_) bytes += region.mapped - region.begin;
  return bytes;
}

AddressSpace::Page& AddressSpace::next_page(Region& region) {
  const uint64_t mapped = region.mapped - region.begin;
  if (region.pages.size() <= kLargerPages.size() && mapped >= region.grows_at) {
    const abi::MemoryAllocationProperties properties = page_properties(device_);
    Page page{.size = kLargerPages[region.pages.size() - 1].size};
    if (driver_.memory_create(&page.handle, page.size, &properties, 0) == abi::kSuccess) {
      region.pages.push_back(page);
      region.grows_at =
          kLargerPages[std::min(region.pages.size(), kLargerPages.size()) - 1].when_mapped;
    } else {
      region.grows_at = 2 * mapped;  // until there is memory, the pages that exist do
    }
  }
  const auto fits = [&](const Page& page) { return page.size <= region.end - region.mapped; };
  return *std::ranges::find_if(region.pages.rbegin(), region.pages.rend(), fits);
}

void AddressSpace::map_until(Region& region, uint64_t end) {
  if (end <= region.mapped) return;
  const RelaxedCaptureMode relaxed(driver_);
  const uint64_t first = region.mapped;
  while (region.mapped < end) {
    Page& page = next_page(region);
    PYGRAPH_CHECK(driver_, memory_map(region.mapped, page.size, 0, page.handle, 0));
    if (page.address == 0) page.address = region.mapped;
    region.mappings.push_back({region.mapped, page.size});
    region.mapped += page.size;
  }
  const abi::MemoryAccess access{{.type = 1, .id = device_}, kReadWrite};
  PYGRAPH_CHECK(driver_, memory_set_access(first, region.mapped - first, &access, 1));
}

uint64_t AddressSpace::allocate(uint64_t size, uint64_t low_bits, Content content) {
  Region& region = regions_[static_cast<size_t>(content)];
  const uint64_t address = align_up(region.next) + low_bits % kAllocationAlignment;
  const uint64_t end = address + std::max<uint64_t>(size, 1);
  if (end > region.end) {
    throw DriverError("out of addresses for recording", abi::kOutOfMemory);
  }
  map_until(region, end);
  region.next =
      end + (gap_ != kIrregularGaps ? gap_ : kAllocationAlignment * (1 + random_() % kMostGaps));
  return address;
}

// Only what `kept` covers of the mapping gets memory of its own; a small page does for the rest.
bool AddressSpace::replace_mapping(const Page& small, const Range& mapping,
                                   const Range& kept) noexcept {
  const abi::MemoryAllocationProperties properties = page_properties(device_);
  const abi::MemoryAccess access{{.type = 1, .id = device_}, kReadWrite};
  abi::MemoryHandle own = 0;
  if (driver_.memory_create(&own, kept.size, &properties, 0) != abi::kSuccess) return false;
  bool is_done = driver_.memory_unmap(mapping.address, mapping.size) == abi::kSuccess;
  for (uint64_t address = mapping.address; is_done && address < mapping.address + mapping.size;) {
    const bool is_kept = address == kept.address;
    const uint64_t size = is_kept ? kept.size : small.size;
    is_done =
        driver_.memory_map(address, size, 0, is_kept ? own : small.handle, 0) == abi::kSuccess;
    address += size;
  }
  is_done = is_done &&
            driver_.memory_set_access(mapping.address, mapping.size, &access, 1) == abi::kSuccess &&
            driver_.memset_d8_async(kept.address, 0, kept.size, nullptr) == abi::kSuccess;
  driver_.memory_release(own);  // the mapping keeps it
  return is_done;
}

void AddressSpace::retain(const std::vector<Range>& pieces) noexcept {
  const RelaxedCaptureMode relaxed(driver_);
  for (Region& region : regions_) {
    const Page& small = region.pages.front();
    std::erase_if(region.mappings, [&](const Range& mapping) {
      uint64_t begin = mapping.size;  // of all pieces in it, as offsets
      uint64_t end = 0;
      for (const Range& piece : pieces) {
        if (piece.address >= mapping.address + mapping.size) continue;
        if (piece.address + piece.size <= mapping.address) continue;
        begin = std::min(begin, std::max(piece.address, mapping.address) - mapping.address);
        end = std::max(end, std::min(piece.address + piece.size - mapping.address, mapping.size));
      }
      if (begin >= end) return false;
      begin = begin / small.size * small.size;
      end = (end + small.size - 1) / small.size * small.size;
      return replace_mapping(small, mapping, {mapping.address + begin, end - begin});
    });
  }
}

void AddressSpace::poison() {
  const Staging staging(driver_);
  for (Region& region : regions_) {
    for (Page& page : region.pages) {
      if (page.address == 0 || page.is_filled) continue;
      std::ranges::fill(staging.words(), region.poison);
      staging.for_each_piece(page.address, page.size, [&](uint64_t address, auto words) {
        PYGRAPH_CHECK(driver_, copy_to_device(address, words.data(), words.size_bytes()));
      });
      page.is_filled = true;
    }
  }
}

bool AddressSpace::untouched() {
  const Staging staging(driver_);
  uint64_t all = 0;
  for (Region& region : regions_) {
    for (Page& page : region.pages) {
      if (page.address == 0) continue;
      uint64_t difference = 0;
      staging.for_each_piece(page.address, page.size, [&](uint64_t address, auto words) {
        PYGRAPH_CHECK(driver_, copy_to_host(words.data(), address, words.size_bytes()));
        for (const uint64_t word : words) difference |= word ^ region.poison;
      });
      page.is_filled &= difference == 0;
      all |= difference;
    }
  }
  return all == 0;
}

}  // namespace pygraph
