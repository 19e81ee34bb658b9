// The order of a program's steps: which streams have to wait for which.
#pragma once

#include "program.h"

namespace pygraph::fuzz {

// Forgets overlaps and early uses that would race, then joins streams until a step begins only when
// all that it conflicts with have ended, in an order that a stream capture has edges for. Delays
// frees of memory until its own stream waits for all uses, as Tensor.record_stream does.
void order_steps(Program& program);

}  // namespace pygraph::fuzz
