// Scratch memory of a library, such as cuBLAS's workspace, which all its kernels use in turn.
#pragma once

#include "pygraph/link.h"

namespace pygraph {

// Gives each operator that uses scratch memory (Recording::scratch) a symbol of its own in its
// place, as processors rename registers: operators that share nothing else can then run at a time.
// Scratch that a node outside of any operator uses too stays as it is.
void split_scratch(LinkedGraph& linked);

}  // namespace pygraph
