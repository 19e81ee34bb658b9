#include "pygraph/constants.h"

#include <algorithm>

namespace pygraph {
namespace {

// No memory lies below or above: the first 16 MiB, and what 57 bits cannot address.
constexpr uint64_t kLowest = uint64_t{1} << 24;
constexpr uint64_t kHighest = uint64_t{1} << 57;

bool lies_in(const std::vector<Range>& ranges, uint64_t address) {
  return std::ranges::any_of(ranges, [&](const Range& range) { return range.contains(address); });
}

// 0: the driver knows no memory there.
uint64_t number_of(const Driver& driver, uint64_t address) {
  unsigned long long number = 0;
  const abi::Result result =
      driver.pointer_get_attribute(&number, abi::kPointerAttributeBufferId, address);
  return result == abi::kSuccess ? number : 0;
}

}  // namespace

void check_foreign_memory(const Driver& driver, const std::vector<ForeignMemory>& memory) {
  for (const ForeignMemory& foreign : memory) {
    if (number_of(driver, foreign.address) == foreign.number) continue;
    throw MemoryGone(foreign.user + " uses memory that has been freed since it was recorded");
  }
}

ConstantOwners::Answer ConstantOwners::of(uint64_t address) {
  if (address < kLowest || address >= kHighest) return {};
  const auto [answer, is_new] = answers_.try_emplace(address);
  if (is_new) {
    answer->second = ask(address);
    // Perhaps the end of some memory, from which a kernel counts backwards.
    if (answer->second.owner == Owner::kNone) answer->second = ask(address - 1);
  }
  return answer->second;
}

ConstantOwners::Answer ConstantOwners::ask(uint64_t address) {
  if (lies_in(surroundings_.held, address)) return {Owner::kHeld};
  if (lies_in(surroundings_.kept_stand_ins, address)) return {Owner::kStandIn};
  unsigned type = 0;
  if (driver_.pointer_get_attribute(&type, abi::kPointerAttributeMemoryType, address) !=
      abi::kSuccess) {
    return {};
  }
  if (type == abi::kMemoryTypeHost) return {Owner::kHost};
  if (is_cached(address)) return {Owner::kCached};
  const uint64_t number = number_of(driver_, address);
  // Memory that the driver does not number cannot be told from what takes its place.
  return number == 0 ? Answer{Owner::kCached} : Answer{Owner::kForeign, {address, number}};
}

bool ConstantOwners::is_cached(uint64_t address) {
  if (!surroundings_.cached) return false;
  if (!cached_) cached_ = surroundings_.cached();
  return lies_in(*cached_, address);
}

}  // namespace pygraph
