// The outputs of a compiled function, and how a replay creates them.
//
// Determined once, in a recording: each output is fresh memory, a view of fresh memory, an argument
// itself, a view of an argument, or an object that is the same at every call. A replay allocates
// fresh memory and builds the tensors on it, so a result is never overwritten later. (Gradients
// that nobody can read any more are: replay/left_gradients.h.)
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "pygraph/link.h"
#include "tensors/arguments.h"

namespace pygraph::bindings {

enum class OutputKind : uint8_t {
  kFresh,      // a tensor on buffer `source`
  kArgument,   // argument `source` itself
  kView,       // a view of argument `source`'s storage
  kRepeated,   // the same object as output `source`
  kPersistent  // the object the recording returned: None, a number, a constant tensor
};

struct Output {
  OutputKind kind = OutputKind::kPersistent;
  uint32_t source = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  // Bytes from the start of the buffer, or from the argument's first element.
  int64_t byte_offset = 0;
  caffe2::TypeMeta dtype;
  ConjNegBits conj_neg;
  bool operator==(const Output&) const = default;
};

// A storage that the recorded function made for its outputs. A replay allocates it, at `offset` in
// the block `block`.
struct OutputBuffer {
  uint64_t bytes = 0;
  uint64_t address = 0;  // where the recording had it
  uint32_t block = 0;
  uint64_t offset = 0;
};

// All outputs of one recording. To be copied and destroyed with Python's lock.
struct OutputPlan {
  std::vector<Output> outputs;
  std::vector<OutputBuffer> buffers;
  std::vector<uint64_t> block_bytes;  // one storage each, which a replay allocates; by block
  // By block: the slot of the donated input whose memory it takes over, or OutputPlacement::kNone.
  std::vector<uint32_t> block_donors;
  std::vector<pybind11::object> persistent;  // by output; null where unused
  bool is_tuple = false;

  // Throws NotRelocatable unless both recordings returned the same things.
  void check_equal(const OutputPlan& other) const;
};

// `returned` is the list or tuple the function returned, `stand_ins` its argument list, and `space`
// the range of the recording's stand-in addresses. Each buffer gets a block of its own, without a
// donor.
OutputPlan plan_outputs(PyObject* returned, PyObject* stand_ins, Range space);

// By buffer: whether no output but those at `positions` is on it.
std::vector<uint8_t> used_only_at(const OutputPlan& plan, const std::vector<uint32_t>& positions);

// Places small buffers together in blocks of less than 1 MiB, if only outputs at `positions` use
// them: tensors saved for backward, and gradients. A training step has hundreds, most of which have
// the same lifetime, and each block takes the allocator 1 to 4 us to allocate and free. Other
// results are not shared: a small one must not keep a block alive.
//
// A block is one storage, of which the tensors are views, so that Tensor.record_stream holds for
// all of it.
void share_blocks(OutputPlan& plan, const std::vector<uint32_t>& positions);

// The buffers that fresh memory is needed for at each call, by slot as the engine counts outputs.
std::vector<const OutputBuffer*> output_slots(const OutputPlan& plan);

// The slots of buffers that only outputs at `positions` use.
std::vector<uint32_t> sharing_slots(const OutputPlan& plan, const std::vector<uint32_t>& positions);

// Gives blocks their donors (by slot), after share_blocks(). Buffers side by side in one donor
// become one block.
void apply_placements(OutputPlan& plan, const std::vector<OutputPlacement>& donors);

// A tensor on `storage`; sizes and strides in elements, `byte_offset` from the storage's start.
at::Tensor make_tensor(const c10::Storage& storage, caffe2::TypeMeta dtype, c10::IntArrayRef sizes,
                       c10::IntArrayRef strides, int64_t byte_offset, ConjNegBits conj_neg);

// The tuple or list to return, on storages by block. `instead`: objects to be returned in place of
// outputs, null for those that are to be built; or empty. Null with a Python error set on failure.
PyObject* build_outputs(const OutputPlan& plan, const std::vector<c10::Storage>& blocks,
                        PyObject* arguments, const std::vector<PyObject*>& instead = {});

}  // namespace pygraph::bindings
