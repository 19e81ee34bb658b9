// Makes a program that fails smaller.
#pragma once

#include <functional>

#include "program.h"

namespace pygraph::fuzz {

// A program that still fails and that nothing can be dropped from, as far as `fails` was asked.
Program reduce(Program program, const std::function<bool(const Program&)>& fails);

}  // namespace pygraph::fuzz
