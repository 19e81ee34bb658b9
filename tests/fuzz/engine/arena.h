// Memory for replays. Whatever nobody owns holds random bytes, which must stay what they are.
#pragma once

#include <map>
#include <memory>
#include <random>

#include "pygraph/recording.h"

namespace pygraph::fuzz {

class Arena {
 public:
  Arena();

  // Room for `size` bytes, at an address that is `low_bits` modulo 512, at least 64 bytes away from
  // others. It holds random bytes.
  uint64_t take(uint64_t size, uint64_t low_bits, std::mt19937_64& random);
  void release(uint64_t address);
  // From here on, places are looked for in little more than `size` bytes. What was taken is
  // given back.
  void begin(uint64_t size);

  // Whether what nobody owns is untouched.
  bool is_untouched() const;
  // Gives the piece its random bytes back.
  void restore(uint64_t address);

 private:
  uint64_t find(uint64_t size, uint64_t low_bits, uint64_t from) const;

  std::unique_ptr<std::byte[]> memory_;
  std::unique_ptr<std::byte[]> pattern_;
  uint64_t used_ = 0;                   // bytes that were ever looked at
  uint64_t limit_ = 0;                  // of the current program
  std::map<uint64_t, uint64_t> taken_;  // size by offset
};

}  // namespace pygraph::fuzz
