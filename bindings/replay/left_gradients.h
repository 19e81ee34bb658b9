// The gradients that replays of a graph leave on tensors of the program.
//
// Each call of a training step with `zero_grad()` at its beginning drops the gradients of the call
// before, and leaves new ones. A gradient that nothing but its tensor holds, and that the last
// replay left there, is taken from the tensor before the launch, and its memory is overwritten: an
// allocation, a tensor and a release less for each. The program cannot tell: nobody has the old one
// any more, and during the call the tensor has no gradient, as after `zero_grad()`. (Another thread
// that looks meanwhile finds none, also where the callable replaces gradients without dropping the
// old ones first.)
#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>

#include <optional>
#include <vector>

#include "replay/launch.h"
#include "tensors/outputs.h"

namespace pygraph::bindings {

// The gradients of `tensors` (a list) are the outputs from `first` on.
struct GradientOwners {
  PyObject* tensors = nullptr;  // null: there are none
  Py_ssize_t first = 0;
};

// Gradients that were taken from their tensors. The destructor puts back those that are left, for
// calls that fail. Needs Python's lock.
class TakenGradients {
 public:
  TakenGradients() = default;
  TakenGradients(const TakenGradients&) = delete;
  TakenGradients& operator=(const TakenGradients&) = delete;
  ~TakenGradients();

 private:
  friend class LeftGradients;
  std::vector<at::Tensor> owners_;
  std::vector<at::Tensor> gradients_;  // by owner; undefined: not taken
};

// Of one graph. All functions need Python's lock.
class LeftGradients {
 public:
  // Takes the gradients that the launch may overwrite, and gives their memory to `launch.outputs`.
  void take(const GradientOwners& owners, const OutputPlan& plan, Launch& launch,
            TakenGradients& taken);
  // After the launch: sets the gradients. Returns the objects to be returned in place of outputs:
  // an ellipsis for each gradient that is set, null for what the caller has to build.
  std::vector<PyObject*> leave(const GradientOwners& owners, const OutputPlan& plan,
                               const Launch& launch, TakenGradients& taken);

 private:
  struct Left {
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;
    const void* address = nullptr;
  };
  // By gradient: whether a replay can overwrite the last one, that is, it has a block of memory for
  // itself.
  static std::vector<bool> alone(const GradientOwners& owners, const OutputPlan& plan);
  static bool may_be_taken(const at::Tensor& gradient, const Left& left, const Output& output);

  std::vector<bool> alone_;
  std::vector<Left> left_;     // by the last replay; empty if it left none
  CUstream stream_ = nullptr;  // that it was launched on
};

}  // namespace pygraph::bindings
