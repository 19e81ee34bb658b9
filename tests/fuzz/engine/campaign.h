// Many random programs, one after the other.
#pragma once

#include <optional>

#include "generate.h"
#include "life.h"

namespace pygraph::fuzz {

// What is wrong with a program's life, if anything. In every fourth one a driver call fails.
std::optional<std::string> find_fault(Machine& machine, Arena& arena, const Program& program,
                                      Tally& tally);

}  // namespace pygraph::fuzz
