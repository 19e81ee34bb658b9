// The program as it stands: step by step, each value in memory of its own.
#pragma once

#include <vector>

#include "intervals.h"
#include "program.h"

namespace pygraph::fuzz {

// `bases`: where each value begins. Inputs may overlap.
void run_reference(const Program& program, const std::vector<std::byte*>& bases);

// The bytes of each value that the program writes.
std::vector<Intervals> written_bytes(const Program& program);

}  // namespace pygraph::fuzz
