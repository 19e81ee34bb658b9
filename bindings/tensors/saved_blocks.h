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

// `outputs`, a list or tuple that an uncaptured call returned, with the saved tensors that `plan`
// has joined in new blocks, on PyTorch's current stream of the device. A block whose tensors are
// not as in the recording, or are in use elsewhere, is left as it is; so is one of a replay. New
// reference; null with a Python error set on failure. Throws DriverError, or c10::Error if there is
// no memory; `outputs` is unchanged then.
PyObject* with_joined_tensors(const Driver& driver, const OutputPlan& plan, PyObject* outputs,
                              c10::Device device);

}  // namespace pygraph::bindings
