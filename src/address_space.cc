#include "pygraph/address_space.h"

#include <algorithm>

#include "pygraph/handles.h"

namespace pygraph {
namespace {

constexpr uint64_t kAlignment = 512;
constexpr uint64_t kNanPattern = ~uint64_t{0};  // NaN in every IEEE format and in bfloat16
constexpr uint64_t kSmallIntegers = 1;          // int64 1; int32 1, 0
constexpr int kReadWrite = 3;

abi::MemoryAllocationProperties page_properties(int device) {
  abi::MemoryAllocationProperties properties{};
  properties.type = 1;  // pinned, the only type
  properties.location = {.type = 1, .id = device};
  return properties;
}

}  // namespace

AddressSpace::AddressSpace(const Driver& driver, int device, uint64_t capacity, uint64_t gap)
    : driver_(driver), device_(device), capacity_(capacity), gap_(gap) {
  const abi::MemoryAllocationProperties properties = page_properties(device);
  size_t granularity = 0;
  PYGRAPH_CHECK(driver_, memory_get_granularity(&granularity, &properties, /*minimum=*/0));
  page_size_ = granularity;
  capacity_ = capacity / (2 * page_size_) * (2 * page_size_);
  abi::DevicePointer base = 0;
  PYGRAPH_CHECK(driver_, address_reserve(&base, capacity_, 0, 0, 0));
  base_ = base;
  try {
    for (const uint64_t poison : {kNanPattern, kSmallIntegers}) {
      abi::MemoryHandle page = 0;
      PYGRAPH_CHECK(driver_, memory_create(&page, page_size_, &properties, 0));
      const uint64_t begin = base_ + regions_.size() * (capacity_ / 2);
      regions_.push_back({begin, begin, begin, page, poison});
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
    driver_.memory_release(region.page);
  }
  driver_.address_free(base_, capacity_);
}

uint64_t AddressSpace::mapped_bytes() const {
  uint64_t bytes = 0;
  for (const Region& region : regions_) bytes += region.mapped - region.begin;
  return bytes;
}

void AddressSpace::map_until(Region& region, uint64_t end) {
  if (end <= region.mapped) return;
  const RelaxedCaptureMode relaxed(driver_);
  const uint64_t first = region.mapped;
  while (region.mapped < end) {
    PYGRAPH_CHECK(driver_, memory_map(region.mapped, page_size_, 0, region.page, 0));
    region.mapped += page_size_;
  }
  const abi::MemoryAccess access{{.type = 1, .id = device_}, kReadWrite};
  PYGRAPH_CHECK(driver_, memory_set_access(first, region.mapped - first, &access, 1));
}

uint64_t AddressSpace::allocate(uint64_t size, uint64_t low_bits, Content content) {
  Region& region = regions_[static_cast<size_t>(content)];
  const uint64_t aligned = (region.next + kAlignment - 1) / kAlignment * kAlignment;
  const uint64_t address = aligned + low_bits % kAlignment;
  const uint64_t end = address + std::max<uint64_t>(size, 1);
  if (end > region.begin + capacity_ / 2) {
    throw DriverError("out of addresses for recording", abi::kOutOfMemory);
  }
  map_until(region, end);
  region.next = end + gap_;
  return address;
}

void AddressSpace::poison() {
  for (Region& region : regions_) {
    map_until(region, region.begin + page_size_);
    const std::vector<uint64_t> pattern(page_size_ / sizeof(uint64_t), region.poison);
    PYGRAPH_CHECK(driver_, copy_to_device(region.begin, pattern.data(), page_size_));
  }
}

bool AddressSpace::untouched() {
  for (const Region& region : regions_) {
    std::vector<uint64_t> content(page_size_ / sizeof(uint64_t));
    PYGRAPH_CHECK(driver_, copy_to_host(content.data(), region.begin, page_size_));
    const auto is_poison = [&](uint64_t word) { return word == region.poison; };
    if (!std::all_of(content.begin(), content.end(), is_poison)) return false;
  }
  return true;
}

}  // namespace pygraph
