// Arguments that a call gives away: tensors that only the call's argument list refers to, on a
// whole block of PyTorch's allocator that no other stream uses (recorded_streams.h). They would be
// freed after the launch, so a graph may use their memory (see src/plan_memory.cc).
#pragma once

#include <Python.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <vector>

namespace pygraph::bindings {

// Tensors of an argument list that have a storage for themselves: one, or several views of it.
struct GivenAway {
  std::vector<uint32_t> positions;  // in the list; the first one begins where the storage does
  uint64_t bytes = 0;               // of the storage, up to the end of what they view
};

// Whether the tensors at these positions are given away, with at least tensors.bytes bytes, if the
// call's own argument lists hold `holders` references to each.
bool is_given_away(PyObject* arguments, const GivenAway& tensors, Py_ssize_t holders);

// The tensors that a list gives away, if it holds the only references to them.
std::vector<GivenAway> given_away(PyObject* arguments);

// Memory that moved from arguments to outputs. Unless commit() was called, the destructor moves it
// back, for calls that fail.
class Donations {
 public:
  Donations() = default;
  Donations(const Donations&) = delete;
  Donations& operator=(const Donations&) = delete;
  ~Donations();

  // The argument's memory; the argument has none from here on.
  c10::DataPtr take(PyObject* argument);
  // The output's storage that got the block taken last; a failed call returns it from there.
  void given_to(const c10::Storage& output);
  void commit() { moves_.clear(); }

 private:
  struct Move {
    c10::Storage from;
    c10::Storage to;
  };
  std::vector<Move> moves_;
};

}  // namespace pygraph::bindings
