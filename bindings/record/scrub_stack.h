#pragma once

namespace pygraph::bindings {

// Zeroes the stack below the caller, where the recorded code will run. Kernels whose parameters are
// large structs (lists of tensors) are launched with whatever the stack held in the unused part;
// without this, it holds addresses from before the recording, which belong to no symbol.
__attribute__((noinline)) void scrub_stack();

}  // namespace pygraph::bindings
