#include "arena.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "effects.h"

namespace pygraph::fuzz {
namespace {

constexpr uint64_t kCapacity = uint64_t{1} << 30;  // addresses; memory only where it is used
constexpr uint64_t kGuard = 64;
constexpr uint64_t kAlignment = 512;

}  // namespace

Arena::Arena() : memory_(new std::byte[kCapacity]), pattern_(new std::byte[kCapacity]) {}

void Arena::begin(uint64_t size) {
  for (const auto& [offset, size] : taken_) {
    std::memcpy(memory_.get() + offset, pattern_.get() + offset, size);
  }
  taken_.clear();
  limit_ = size + size / 4 + 65536;
}

// The first place from the offset `from` on.
uint64_t Arena::find(uint64_t size, uint64_t low_bits, uint64_t from) const {
  const auto base = reinterpret_cast<uint64_t>(memory_.get());
  uint64_t offset = from;
  const auto align = [&] { offset += (low_bits - (base + offset)) % kAlignment; };
  align();
  auto next = taken_.upper_bound(offset);
  if (next != taken_.begin()) --next;
  for (; next != taken_.end(); ++next) {
    if (offset + size + kGuard <= next->first) break;
    if (next->first + next->second + kGuard <= offset) continue;
    offset = next->first + next->second + kGuard;
    align();
  }
  return offset;
}

uint64_t Arena::take(uint64_t size, uint64_t low_bits, std::mt19937_64& random) {
  uint64_t offset = find(size, low_bits, kGuard + random() % limit_);
  if (offset + size + kGuard > limit_) offset = find(size, low_bits, kGuard);
  limit_ = std::max(limit_, offset + size + kGuard);
  if (limit_ > kCapacity) throw std::logic_error("the program is too large");
  if (limit_ > used_) {
    scatter(pattern_.get() + used_, limit_ - used_, used_ + 1);
    std::memcpy(memory_.get() + used_, pattern_.get() + used_, limit_ - used_);
    used_ = limit_;
  }
  taken_[offset] = size;
  return reinterpret_cast<uint64_t>(memory_.get() + offset);
}

void Arena::release(uint64_t address) {
  restore(address);
  taken_.erase(address - reinterpret_cast<uint64_t>(memory_.get()));
}

void Arena::restore(uint64_t address) {
  const uint64_t offset = address - reinterpret_cast<uint64_t>(memory_.get());
  std::memcpy(memory_.get() + offset, pattern_.get() + offset, taken_.at(offset));
}

bool Arena::is_untouched() const {
  uint64_t offset = 0;
  const auto is_same_until = [&](uint64_t end) {
    return std::memcmp(memory_.get() + offset, pattern_.get() + offset, end - offset) == 0;
  };
  for (const auto& [begin, size] : taken_) {
    if (!is_same_until(begin)) return false;
    offset = begin + size;
  }
  return is_same_until(limit_);
}

}  // namespace pygraph::fuzz
