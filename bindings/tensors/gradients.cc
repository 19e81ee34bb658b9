#include "tensors/gradients.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <stdexcept>

#include "tensors/prefetch.h"

namespace pygraph::bindings {
namespace {

char has_gradient(PyObject* tensors, Py_ssize_t i) {
  return THPVariable_Unpack(PyList_GET_ITEM(tensors, i)).grad().defined() ? 1 : 0;
}

// Kept for good, so that it needs not be looked up.
PyObject* name_of_gradient() {
  static PyObject* name = PyUnicode_InternFromString("grad");
  return name;
}

// Whether an assignment to `tensor.grad` ends in PyTorch's own setter.
bool has_own_setter(PyTypeObject* type) {
  const PyObject* setter = _PyType_Lookup(type, name_of_gradient());
  return type->tp_setattro == PyObject_GenericSetAttr && setter != nullptr &&
         Py_TYPE(setter) == &PyGetSetDescr_Type;
}

// Of what type `tensor.grad` may be; older releases ask for the tensor's own.
template <typename Tensor>
bool is_expected_type(const Tensor& tensor, c10::ScalarType dtype) {
  if constexpr (requires { tensor.grad_dtype(); }) {
    return tensor.grad_dtype() == dtype && tensor.scalar_type() == dtype;
  } else {
    return tensor.scalar_type() == dtype;
  }
}

// Whether the setter would do nothing but store the value: everything that it checks holds, and no
// mode of __torch_function__ is to be told.
bool is_plain_assignment(PyObject* object, const at::Tensor& gradient) {
  if (!THPVariable_CheckExact(object)) return false;
  const at::Tensor& tensor = THPVariable_Unpack(object);
  return !tensor.is_same(gradient) && tensor.layout() == c10::kStrided &&
         gradient.layout() == c10::kStrided && tensor.device() == gradient.device() &&
         is_expected_type(tensor, gradient.scalar_type()) &&
         tensor.options().type_equal(gradient.options()) &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
         !gradient.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
         tensor.sizes().equals(gradient.sizes()) &&
         at::impl::PythonTorchFunctionTLS::stack_len() == 0 && has_own_setter(Py_TYPE(object));
}

}  // namespace

bool set_plain_gradient(PyObject* tensor, const at::Tensor& gradient) {
  if (!is_plain_assignment(tensor, gradient)) return false;
  THPVariable_Unpack(tensor).mutable_grad() = gradient;
  return true;
}

namespace {

// A setter may run Python, which may change the list.
bool set_gradient(PyObject* tensors, Py_ssize_t i, PyObject* value) {
  if (value == Py_Ellipsis) return true;  // it is set
  if (THPVariable_CheckExact(value) &&
      set_plain_gradient(PyList_GET_ITEM(tensors, i), THPVariable_Unpack(value))) {
    return true;
  }
  PyObject* tensor = Py_NewRef(PyList_GET_ITEM(tensors, i));
  const int failed = PyObject_SetAttr(tensor, name_of_gradient(), value);
  Py_DECREF(tensor);
  return failed == 0;
}

}  // namespace

std::string gradient_pattern(PyObject* tensors) {
  std::string pattern(PyList_GET_SIZE(tensors), 0);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) pattern[i] = has_gradient(tensors, i);
  return pattern;
}

// Asks for what will be read of tensors after `i`: each gradient is behind three pointers.
static void prefetch_gradients(PyObject* tensors, Py_ssize_t i) {
  constexpr Py_ssize_t kStep = 6;  // tensors between one pointer and the next
  const auto tensor = [&](Py_ssize_t number) { return PyList_GET_ITEM(tensors, number); };
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  if (i + 3 * kStep < count) prefetch(tensor(i + 3 * kStep), sizeof(THPVariable));
  if (i + 2 * kStep < count) {
    prefetch(THPVariable_Unpack(tensor(i + 2 * kStep)).unsafeGetTensorImpl(), 1);
  }
  if (i + kStep < count) {
    const at::Tensor& next = THPVariable_Unpack(tensor(i + kStep));
    const auto* meta = torch::autograd::impl::get_autograd_meta(next);
    if (meta != nullptr) prefetch(&meta->grad_, 1);
  }
}

std::string gradient_layouts(PyObject* tensors) {
  std::string layouts;
  const auto append = [&](const auto& value) {
    layouts.append(reinterpret_cast<const char*>(&value), sizeof value);
  };
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    const at::Tensor& gradient = THPVariable_Unpack(PyList_GET_ITEM(tensors, i)).grad();
    append(gradient.defined() ? gradient.layout() : c10::Layout::NumOptions);
    if (!gradient.defined() || gradient.layout() != c10::kStrided) continue;
    append(gradient.scalar_type());
    append(gradient.is_conj());
    append(gradient.is_neg());
    append(gradient.is_inference());  // cannot be written outside of that mode
    append(gradient.storage_offset());
    append(gradient.dim());
    for (const int64_t size : gradient.sizes()) append(size);
    for (const int64_t stride : gradient.strides()) append(stride);
  }
  return layouts;
}

static const c10::StorageImpl* memory_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage()
             ? tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()
             : nullptr;
}

// Of two lists of tensors. `other`: the tensor whose memory the gradient is to lie in.
template <class Other>
static bool lie_in(PyObject* tensors, PyObject* others, Other other) {
  if (PyList_GET_SIZE(tensors) != PyList_GET_SIZE(others)) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    const auto* memory = memory_of(THPVariable_Unpack(PyList_GET_ITEM(tensors, i)).grad());
    const at::Tensor& its = other(THPVariable_Unpack(PyList_GET_ITEM(others, i)));
    if (memory == nullptr || memory != memory_of(its)) return false;
  }
  return true;
}

bool gradients_lie_in(PyObject* tensors, PyObject* others) {
  return lie_in(tensors, others,
                [](const at::Tensor& tensor) -> const at::Tensor& { return tensor; });
}

bool gradients_share_memory(PyObject* tensors, PyObject* others) {
  return lie_in(tensors, others,
                [](const at::Tensor& tensor) -> const at::Tensor& { return tensor.grad(); });
}

void bump_gradient_versions(PyObject* tensors) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    const at::Tensor& gradient = THPVariable_Unpack(PyList_GET_ITEM(tensors, i)).grad();
    if (!gradient.defined() || gradient.is_inference()) continue;
    gradient.unsafeGetTensorImpl()->bump_version();
  }
}

bool has_gradient_pattern(PyObject* tensors, std::string_view pattern) {
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  if (static_cast<size_t>(count) != pattern.size()) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    prefetch_gradients(tensors, i);
    if (has_gradient(tensors, i) != pattern[i]) return false;
  }
  return true;
}

bool set_gradients(PyObject* tensors, PyObject* values, Py_ssize_t first) {
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  if (PySequence_Fast_GET_SIZE(values) - first != count) {
    throw std::invalid_argument("not as many gradients as tensors");
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    if (!set_gradient(tensors, i, PySequence_Fast_GET_ITEM(values, first + i))) return false;
  }
  return true;
}

bool clear_gradients(PyObject* tensors) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    if (!set_gradient(tensors, i, Py_None)) return false;
  }
  return true;
}

}  // namespace pygraph::bindings
