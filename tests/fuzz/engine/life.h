// One program's whole life in the engine.
#pragma once

#include <map>
#include <string>

#include "arena.h"
#include "machine.h"

namespace pygraph::fuzz {

struct Tally {
  uint64_t programs = 0;
  uint64_t refused = 0;
  uint64_t replays = 0;
  uint64_t donated = 0;  // replays
  uint64_t with_branches = 0;
  uint64_t with_forks = 0;
  uint64_t with_regions = 0;
  uint64_t with_donors = 0;
  uint64_t failures = 0;  // of the driver that were injected
};

// Lets one call of the driver fail.
struct Fault {
  std::string symbol;
  int call = 0;  // the how-manieth since the program's life began
  abi::Result code = 0;
};

// Records, links, replays and drops the program. Throws Wrong, or whatever else goes wrong.
void live(Machine& machine, Arena& arena, const Program& program, Tally& tally,
          const Fault* fault = nullptr);

// How often a program's life calls each function of the driver, those that it calls.
std::map<std::string, int> calls_of(Machine& machine, Arena& arena, const Program& program);

// A failure for a program's life: one of the calls that a life without it makes.
Fault choose_fault(Machine& machine, Arena& arena, const Program& program, uint64_t seed);

}  // namespace pygraph::fuzz
