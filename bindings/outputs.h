// What a compiled function returns, and how a replay makes it anew.
//
// Looked at once, in a recording: each output is fresh memory, a view of fresh memory, an argument
// itself, a view of an argument, or something that is the same at every call. A replay allocates
// one block per fresh storage and builds the tensors on it, so a result is never overwritten later.
#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>

#include <cstdint>
#include <span>
#include <vector>

#include "donation.h"
#include "pygraph/recording.h"

namespace pygraph {

enum class OutputKind : uint8_t {
  kFresh,      // a tensor on fresh storage `source`
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
  // Bytes from the start of the fresh storage, or from the argument's first element.
  int64_t byte_offset = 0;
  caffe2::TypeMeta dtype;
  bool same_layout(const Output& other) const;
};

// All outputs of one recording.
struct OutputPlan {
  std::vector<Output> outputs;
  std::vector<uint64_t> storage_bytes;      // by fresh storage
  std::vector<uint64_t> storage_addresses;  // where the recording had them
  std::vector<PyObject*> persistent;        // by output; owned references, null where unused
  std::vector<uint8_t> is_saved;            // by fresh storage: only backward will see it
  bool is_tuple = false;

  OutputPlan() = default;
  OutputPlan(OutputPlan&& other) noexcept = default;
  OutputPlan& operator=(OutputPlan&&) = delete;
  ~OutputPlan();  // needs Python's lock

  // Throws NotRelocatable unless both recordings returned the same things.
  void check_equal(const OutputPlan& other) const;
};

// `returned` is the list or tuple the function returned, `stand_ins` its argument list, and `space`
// the range of the recording's stand-in addresses.
OutputPlan plan_outputs(PyObject* returned, PyObject* stand_ins, Range space);

// Marks the storages that only outputs at `positions` use: tensors saved for backward.
void mark_saved(OutputPlan& plan, const std::vector<uint32_t>& positions);

constexpr uint32_t kNoArgument = ~uint32_t{0};

// Device memory for each fresh storage, on the current stream. Small storages that only backward
// will see share one block: they die together, when backward has run, and a training step has
// hundreds. (Not so for what the user sees: a small result must not keep a large block alive, and
// Tensor.record_stream works on whole blocks of the allocator only.)
//
// `donors`, by fresh storage: the position in `arguments` of the argument whose memory it takes, or
// kNoArgument. Empty if the call gives nothing away.
std::vector<c10::Storage> allocate_storages(const OutputPlan& plan, c10::Device device,
                                            std::span<const uint32_t> donors, PyObject* arguments,
                                            Donations& donations);

// The tuple or list to return. Null with a Python error set on failure.
PyObject* build_outputs(const OutputPlan& plan, const std::vector<c10::Storage>& storages,
                        PyObject* arguments);

}  // namespace pygraph
