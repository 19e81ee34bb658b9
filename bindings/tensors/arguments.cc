#include "tensors/arguments.h"

#include <c10/core/CPUAllocator.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <bit>

#include "pygraph/alignment.h"
#include "pygraph/recording.h"
#include "tensors/followed_number.h"
#include "tensors/prefetch.h"
#include "tensors/switches.h"

namespace pygraph::bindings {
namespace {

uint64_t address_of(const at::Tensor& tensor) {
  return reinterpret_cast<uint64_t>(tensor.mutable_data_ptr());
}

// What libraries distinguish: vectorised copies and cuBLAS look at up to 16 and 256 bytes.
uint64_t alignment_class(uint64_t address) {
  const uint64_t low_bit = address == 0 ? 256 : uint64_t{1} << std::countr_zero(address);
  if (low_bit >= 256) return 256;
  return low_bit >= 16 ? 16 : low_bit;
}

Argument unsupported(std::string reason) {
  Argument argument;
  argument.kind = ArgumentKind::kUnsupported;
  argument.reason = std::move(reason);
  return argument;
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
         tensor.has_storage() && !tensor.is_nested();
}

Argument describe_tensor(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.device().is_cuda()) return unsupported("a tensor on the CPU");
  if (tensor.device() != device) return unsupported("on another device");
  if (!is_plain(tensor)) return unsupported("not a plain strided tensor");
  Argument argument;
  argument.kind = tensor.numel() == 0 ? ArgumentKind::kEmptyTensor : ArgumentKind::kTensor;
  argument.dtype = tensor.scalar_type();
  argument.sizes = tensor.sizes().vec();
  argument.strides = tensor.strides().vec();
  argument.extent = extent_of(tensor);
  argument.conj_neg = conj_neg_bits_of(tensor);
  if (argument.kind == ArgumentKind::kTensor) {
    argument.alignment = alignment_class(address_of(tensor));
  }
  return argument;
}

}  // namespace

ConjNegBits conj_neg_bits_of(const at::Tensor& tensor) {
  return {.conjugate = tensor.is_conj(), .negative = tensor.is_neg()};
}

void set_conj_neg_bits(const at::Tensor& tensor, ConjNegBits bits) {
  if (bits.conjugate) tensor._set_conj(true);
  if (bits.negative) tensor._set_neg(true);
}

uint64_t extent_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  uint64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    last += static_cast<uint64_t>((tensor.size(i) - 1) * tensor.stride(i));
  }
  return (last + 1) * tensor.itemsize();
}

const at::Tensor& unpack_tensor(PyObject* object) {
  return THPVariable_Unpack(object);
}

bool is_generator(PyObject* object) {
  return PyObject_IsInstance(object, THPGeneratorClass) == 1;
}

at::Generator unpack_generator(PyObject* object) {
  return reinterpret_cast<THPGenerator*>(object)->cdata;
}

bool Argument::matches(PyObject* argument, c10::Device device) const {
  switch (kind) {
    case ArgumentKind::kTensor:
    case ArgumentKind::kEmptyTensor: {
      if (!THPVariable_Check(argument)) return false;
      const at::Tensor& tensor = unpack_tensor(argument);
      if (tensor.scalar_type() != dtype || tensor.device() != device || !is_plain(tensor) ||
          conj_neg_bits_of(tensor) != conj_neg || !std::ranges::equal(tensor.sizes(), sizes) ||
          !std::ranges::equal(tensor.strides(), strides)) {
        return false;
      }
      if (kind == ArgumentKind::kEmptyTensor) return true;
      return (address_of(tensor) & (alignment - 1)) == 0;
    }
    case ArgumentKind::kInteger: {
      if (!PyLong_Check(argument)) return false;
      int overflow = 0;
      return PyLong_AsLongLongAndOverflow(argument, &overflow) == integer && overflow == 0;
    }
    case ArgumentKind::kFloat:
      return PyFloat_Check(argument) &&
             std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(argument)) == std::bit_cast<uint64_t>(real);
    case ArgumentKind::kFollowedNumber:
      return is_followed_number(argument);
    case ArgumentKind::kGenerator:
      return is_generator(argument);
    case ArgumentKind::kNone:
      return argument == Py_None;
    case ArgumentKind::kUnsupported:
      break;
  }
  return false;
}

static Argument describe_argument(PyObject* object, c10::Device device) {
  if (THPVariable_Check(object)) return describe_tensor(unpack_tensor(object), device);
  Argument argument;
  if (PyLong_Check(object)) {
    int overflow = 0;
    argument.kind = ArgumentKind::kInteger;
    argument.integer = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow != 0) return unsupported("an integer of more than 64 bits");
  } else if (is_followed_number(object)) {
    argument.kind = ArgumentKind::kFollowedNumber;
    argument.extent = 1;
  } else if (PyFloat_Check(object)) {
    argument.kind = ArgumentKind::kFloat;
    argument.real = PyFloat_AS_DOUBLE(object);
  } else if (is_generator(object)) {
    argument.kind = ArgumentKind::kGenerator;
  } else if (object != Py_None) {
    return unsupported(std::string("of type ") + Py_TYPE(object)->tp_name);
  }
  return argument;
}

std::vector<Argument> describe_arguments(PyObject* list, c10::Device device) {
  std::vector<Argument> arguments;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    arguments.push_back(describe_argument(PyList_GET_ITEM(list, i), device));
  }
  return arguments;
}

namespace {

const c10::TensorImpl* tensor_of(PyObject* object) {
  return THPVariable_Check(object) ? unpack_tensor(object).unsafeGetTensorImpl() : nullptr;
}

// Asks for the memory that the comparison of arguments before `i` will read. Arguments lie all over
// the heap, each behind three pointers, and while the GPU worked others have filled the CPU's
// caches: 1100 tensors take 150 to 190 us to compare then, 80 to 115 with this (22 from warm
// caches).
void prefetch_argument(const std::vector<Argument>& arguments, PyObject* list, Py_ssize_t i) {
  constexpr Py_ssize_t kStep = 4;  // arguments between one pointer of the three and the next
  if (i >= 3 * kStep) {
    prefetch(PyList_GET_ITEM(list, i - 3 * kStep), 1);
    prefetch(&arguments[i - 3 * kStep], sizeof(Argument));
  }
  if (i >= 2 * kStep) {
    const Argument& argument = arguments[i - 2 * kStep];
    prefetch(argument.sizes.data(), 1);
    prefetch(argument.strides.data(), 1);
    const auto* tensor = tensor_of(PyList_GET_ITEM(list, i - 2 * kStep));
    if (tensor != nullptr) prefetch(tensor, sizeof *tensor);
  }
  if (i >= kStep) {
    const auto* tensor = tensor_of(PyList_GET_ITEM(list, i - kStep));
    if (tensor == nullptr || !tensor->has_storage()) return;
    prefetch(tensor->unsafe_storage().unsafeGetStorageImpl(), sizeof(c10::StorageImpl));
  }
}

}  // namespace

bool matches(const std::vector<Argument>& arguments, PyObject* list, c10::Device device,
             Positions known) {
  const auto count = static_cast<Py_ssize_t>(arguments.size());
  if (PyList_GET_SIZE(list) != count) return false;
  const bool are_all_unknown = known.first == known.end;
  // Integers come last and tell shapes apart soonest.
  for (Py_ssize_t i = count; i-- > 0;) {
    if (are_all_unknown) {
      prefetch_argument(arguments, list, i);
    } else if (static_cast<size_t>(i) >= known.first && static_cast<size_t>(i) < known.end) {
      i = static_cast<Py_ssize_t>(known.first);
      continue;
    }
    if (!arguments[i].matches(PyList_GET_ITEM(list, i), device)) return false;
  }
  return true;
}

bool are_aligned_alike(const std::vector<Argument>& arguments, PyObject* list) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].kind != ArgumentKind::kTensor) continue;
    PyObject* tensor = PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i));
    if (alignment_class(address_of(unpack_tensor(tensor))) != arguments[i].alignment) return false;
  }
  return true;
}

void check_supported(const std::vector<Argument>& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].kind == ArgumentKind::kUnsupported) {
      throw NotRelocatable("argument " + std::to_string(i) + " is " + arguments[i].reason);
    }
  }
}

static void append_bytes(std::string& signature, const void* data, size_t size) {
  signature.append(static_cast<const char*>(data), size);
}

static void append_argument(std::string& signature, PyObject* object, c10::Device device) {
  const auto append = [&](auto value) { append_bytes(signature, &value, sizeof value); };
  if (THPVariable_Check(object)) {
    const at::Tensor& tensor = unpack_tensor(object);
    if (tensor.device() == device && is_plain(tensor)) {
      append(tensor.numel() == 0 ? ArgumentKind::kEmptyTensor : ArgumentKind::kTensor);
      append(tensor.scalar_type());
      append(static_cast<uint8_t>(tensor.dim()));
      append_bytes(signature, tensor.sizes().data(), tensor.dim() * sizeof(int64_t));
      append_bytes(signature, tensor.strides().data(), tensor.dim() * sizeof(int64_t));
      append(conj_neg_bits_of(tensor));
      if (tensor.numel() > 0) append(alignment_class(address_of(tensor)));
      return;
    }
  }
  const Argument argument = describe_argument(object, device);
  append(argument.kind);
  append(argument.integer);
  append(argument.real);
  signature += argument.reason;
}

std::string signature_of(PyObject* list, c10::Device device) {
  std::string signature;
  signature.reserve(64 * PyList_GET_SIZE(list) + sizeof(Switches));
  const Switches switches = current_switches();
  append_bytes(signature, &switches, sizeof switches);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    append_argument(signature, PyList_GET_ITEM(list, i), device);
  }
  return signature;
}

uint64_t address_of_argument(PyObject* argument) {
  if (is_followed_number(argument)) return bits_of_number(argument);
  return address_of(unpack_tensor(argument));
}

at::Tensor make_stand_in(const Argument& argument, const at::Tensor& like, AddressSpace& space) {
  using Content = AddressSpace::Content;
  const Content content =
      c10::isFloatingType(argument.dtype) ? Content::kFloating : Content::kOther;
  const uint64_t low_bits = argument.alignment % kAllocationAlignment;
  auto* address = reinterpret_cast<void*>(space.allocate(argument.extent, low_bits, content));
  c10::Storage storage(c10::Storage::use_byte_size_t(), argument.extent,
                       c10::DataPtr(address, like.device()), /*allocator=*/nullptr,
                       /*resizable=*/false);
  at::Tensor stand_in = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), like.dtype());
  stand_in.unsafeGetTensorImpl()->set_sizes_and_strides(argument.sizes, argument.strides);
  set_conj_neg_bits(stand_in, argument.conj_neg);
  return stand_in;
}

}  // namespace pygraph::bindings
