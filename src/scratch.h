// Scratch memory of a library, such as cuBLAS's workspace, which all its kernels use one after the
// other.
#pragma once

#include "pygraph/link.h"

namespace pygraph {

// Gives each operator that uses scratch memory (Recording::scratch) a symbol of its own in its
// place, as processors rename registers. Operators that share nothing else can then run at the same
// time. Scratch memory that a node outside operators uses as well is not renamed.
void split_scratch(LinkedGraph& linked);

}  // namespace pygraph
