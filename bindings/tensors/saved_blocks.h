// Saved tensors that lie side by side in one block, so that a backward can place gradients there
// (pygraph/join_saved.h).
//
// The backward's graph takes the block as a whole. If a call of the forward is not replayed (it is
// verified, timed or audited), each tensor has a storage of its own, and the backward's graph could
// not serve that step. So such a call's tensors are copied into blocks before the program gets
// them.
#pragma once

#include <Python.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "pygraph/driver.h"
#include "tensors/outputs.h"

namespace pygraph::bindings {

// Joins outputs at `positions`, after share_blocks(). `gradients`: bytes of each gradient that the
// backward will compute.
void join_saved_tensors(OutputPlan& plan, const std::vector<uint32_t>& positions,
                        const std::vector<uint64_t>& gradients);

// Copies the saved tensors that `plan` has joined from `outputs`, the list that an uncaptured call
// returned, into new blocks, on PyTorch's current stream of the device, and replaces them in the
// list: block by block, so that the memory of one block is needed beside them. A block whose
// tensors are not as in the recording, or are in use elsewhere, is left as it is; so is one of a
// replay. Needs Python's lock, and releases it meanwhile. Throws DriverError, or c10::Error if
// there is no memory; the list has the same values then.
void copy_into_blocks(const Driver& driver, const OutputPlan& plan, PyObject* outputs,
                      c10::Device device);

}  // namespace pygraph::bindings
