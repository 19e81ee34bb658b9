// What the launches of a random program do to memory: bytes that depend on every byte they read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "program.h"

namespace pygraph::fuzz {

// Where an access begins in memory; for random state, its two words are apart.
struct Place {
  std::byte* first = nullptr;
  std::byte* second = nullptr;
};
using Locate = std::function<Place(const Access&)>;

// A running launch. Early and late, if both are called, in this order, do what the kernel does.
class Effects {
 public:
  explicit Effects(uint64_t number) : digest_(number * 0x9E3779B97F4A7C15U + 1) {}
  void run_early(const Program& program, const Launch& launch, const Locate& locate) {
    run(program, launch, locate, true);
  }
  void run_late(const Program& program, const Launch& launch, const Locate& locate) {
    run(program, launch, locate, false);
  }

 private:
  void run(const Program& program, const Launch& launch, const Locate& locate, bool is_early);
  uint64_t digest_;
};

// Random bytes.
void scatter(std::byte* to, size_t size, uint64_t seed);

}  // namespace pygraph::fuzz
