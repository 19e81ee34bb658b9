#include "effects.h"

#include <algorithm>
#include <cstring>

namespace pygraph::fuzz {
namespace {

uint64_t mix(uint64_t digest, uint64_t word) {
  digest = (digest ^ word) * 0xD6E8FEB86659FD93U;
  return digest ^ (digest >> 32);
}

uint64_t absorb(uint64_t digest, const std::byte* from, size_t size) {
  uint64_t word = 0;
  size_t i = 0;
  for (; i + sizeof word <= size; i += sizeof word) {
    std::memcpy(&word, from + i, sizeof word);
    digest = mix(digest, word);
  }
  word = 0;
  std::memcpy(&word, from + i, size - i);
  return mix(digest, word);
}

}  // namespace

void scatter(std::byte* to, size_t size, uint64_t seed) {
  uint64_t state = seed * 0x9E3779B97F4A7C15U + 7;
  for (size_t i = 0; i < size; i += sizeof state) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(to + i, &state, std::min(sizeof state, size - i));
  }
}

void Effects::run(const Program& program, const Launch& launch, const Locate& locate,
                  bool is_early) {
  for (const Access& access : launch.accesses) {
    if (access.is_early != is_early || !access.reads || access.stores_address) continue;
    const Place place = locate(access);
    if (program.values[access.value].kind == ValueKind::kRandom) {
      digest_ = absorb(absorb(digest_, place.first, 8), place.second, 8);
    } else {
      digest_ = absorb(digest_, place.first, access.size);
    }
  }
  for (size_t i = 0; i < launch.accesses.size(); ++i) {
    const Access& access = launch.accesses[i];
    if (access.is_early != is_early || !access.writes || access.stores_address) continue;
    scatter(locate(access).first, access.size, mix(digest_, i));
  }
}

}  // namespace pygraph::fuzz
