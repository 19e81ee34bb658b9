// PyTorch's modes of a thread that decide what a callable computes, or whether it may be replayed;
// and its hooks for saved tensors.
#pragma once

#include <c10/core/ScalarType.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <string>

#include "tensors/switches.h"

namespace pygraph::bindings {

// The modes that Python and operators obey.
struct Modes {
  struct Autocast {
    bool is_enabled;
    c10::ScalarType dtype;
    bool operator==(const Autocast&) const = default;
  };
  bool grad;
  bool inference;
  bool autocast_cache;
  c10::ScalarType default_dtype;
  std::array<Autocast, 2> autocast;  // of the GPU, of the CPU
  uint64_t seed;                     // of the CPU's default generator
  Switches switches;
  bool operator==(const Modes&) const = default;

  // Equal for equal modes.
  std::string text() const;
};

// The modes of this thread now.
Modes current_modes();

// Whether something of the program's must see the operators of this thread: anomaly detection,
// modes of __torch_dispatch__ and __torch_function__, hooks for all saved tensors (or that there
// may be none), forward gradients, torch.jit.trace.
bool are_operators_watched();

// Removes the hooks for saved tensors that were pushed with `pack` from the thread's stack,
// wherever they are, in one step: an interrupt finds them on the stack or gone. `with_others`: and
// those that were pushed after them. Returns whether there were any of these. Needs Python's lock.
bool remove_saved_tensors_hooks(pybind11::handle pack, bool with_others);

}  // namespace pygraph::bindings
