// The arguments of a compiled function: a graph's requirements on them, and their addresses.
//
// A graph may be replayed for a call whose arguments have the same kinds, shapes, strides, dtypes
// and integer values as those it was recorded with, and addresses at least as aligned. The
// compiler's guards ensure most of that already; the check costs some 20 ns per tensor and excludes
// replays for wrong arguments.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <Python.h>

#include <string>
#include <vector>

#include "pygraph/address_space.h"

namespace pygraph::bindings {

enum class ArgumentKind : uint8_t {
  kTensor,
  kEmptyTensor,
  kInteger,
  kFloat,
  kFollowedNumber,  // a number whose value may differ from call to call (followed_number.h)
  kGenerator,
  kNone,
  kUnsupported  // graphs cannot take it; `reason` says why
};

// Operations that PyTorch leaves to the reader of the tensor.
struct ConjNegBits {
  bool conjugate = false;
  bool negative = false;
  bool operator==(const ConjNegBits&) const = default;
};
ConjNegBits conj_neg_bits_of(const at::Tensor& tensor);
void set_conj_neg_bits(const at::Tensor& tensor, ConjNegBits bits);

struct Argument {
  ArgumentKind kind = ArgumentKind::kNone;
  // Tensors.
  c10::ScalarType dtype{};
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  uint64_t extent = 0;     // bytes from the first to one past the last element; of a number, 1
  uint64_t alignment = 0;  // of the address, in classes: 1, 2, 4, 8, 16, 256
  ConjNegBits conj_neg;
  // Numbers.
  int64_t integer = 0;
  double real = 0;
  std::string reason;

  // False for an unsupported argument.
  bool matches(PyObject* argument, c10::Device device) const;
  // Whether graphs get its address at each call; of a followed number, its bits.
  bool is_relocated() const {
    return kind == ArgumentKind::kTensor || kind == ArgumentKind::kFollowedNumber;
  }
};

std::vector<Argument> describe_arguments(PyObject* list, c10::Device device);

// Positions in a list, from `first` to before `end`.
struct Positions {
  size_t first = 0;
  size_t end = 0;
};

// Whether the list's arguments match all of `arguments`, one by one, except for those that are
// `known` to match.
bool matches(const std::vector<Argument>& arguments, PyObject* list, c10::Device device,
             Positions known = {});

// Whether the tensors of a matching list have exactly the same alignment classes.
bool are_aligned_alike(const std::vector<Argument>& arguments, PyObject* list);

// Throws NotRelocatable, with the position, for an argument that graphs cannot take.
void check_supported(const std::vector<Argument>& arguments);

// The signature of the arguments, and of PyTorch's switches: equal for calls that one recording can
// serve. Uncaptured calls of programs whose shapes vary compute it each time, so it allocates
// nothing per argument.
std::string signature_of(PyObject* list, c10::Device device);

// A tensor like `like`, at stand-in addresses, of exactly the alignment class of `argument`.
at::Tensor make_stand_in(const Argument& argument, const at::Tensor& like, AddressSpace& space);

// Of an argument that is relocated.
uint64_t address_of_argument(PyObject* argument);

// Bytes from the tensor's first element to one past its last.
uint64_t extent_of(const at::Tensor& tensor);

// The tensor behind a Python object; the object must be a tensor.
const at::Tensor& unpack_tensor(PyObject* object);
bool is_generator(PyObject* object);
at::Generator unpack_generator(PyObject* object);

}  // namespace pygraph::bindings
