// Random programs.
#pragma once

#include "program.h"

namespace pygraph::fuzz {

// What programs may do that not every one of them does.
struct Features {
  bool touching = false;  // ends of allocations that are the beginnings of others
  bool tables = true;     // addresses in device memory, used by kernels that declare nothing
  bool forks = true;      // steps on other streams
  bool lingering = true;  // launches with memory that has just been freed
};

Program generate(uint64_t seed, const Features& features = {});

}  // namespace pygraph::fuzz
