// Which tensors that a forward saves are to lie side by side, so that gradients find room there.
//
// A gradient takes over the memory of a saved tensor that the backward does not need any more, if
// that is large enough, and not much larger (src/output_placement.cc). The tensors of a small batch
// may be too small: a Llama that saves 98 tensors of 1.5 MiB and 36 of 4 has 36 gradients of 6 MiB.
// Four tensors of 1.5 MiB that were computed one after the other, in one block, are as large as
// such a gradient, and the backward is done with them at about the same time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace pygraph {

// Saved tensors and gradients that are smaller take no part: each address that changes between
// calls costs host time.
constexpr uint64_t kSmallestDonation = uint64_t{1} << 20;

// Blocks are not larger. (All of a block stays allocated as long as one of its tensors is in use.)
constexpr uint64_t kLargestJoinedBlock = uint64_t{16} << 20;

// `saved`: bytes of each saved tensor, in the order in which the forward returns them. `gradients`:
// bytes of each gradient that the backward will compute. Returns the groups that are to be joined,
// as indices into `saved`, in order: two to eight of sixteen tensors in a row. Tensors that serve a
// gradient alone are in none.
std::vector<std::vector<uint32_t>> join_saved(std::span<const uint64_t> saved,
                                              std::vector<uint64_t> gradients);

}  // namespace pygraph
