#include "callables/argument_form.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <bit>
#include <string_view>
#include <utility>

namespace py = pybind11;

namespace pygraph::bindings {
namespace {

constexpr int kDeepest = 32;           // containers in each other
constexpr size_t kMostTensors = 4096;  // compared with each other when the form is made

bool is_type_of_value(PyTypeObject* type) {
  return type == Py_TYPE(Py_None) || type == &PyBool_Type || type == &PyLong_Type ||
         type == &PyFloat_Type || type == &PyComplex_Type || type == &PyUnicode_Type ||
         type == &PyBytes_Type || type == &THPDtypeType || type == &THPDeviceType;
}

// Of values of the same type. Equal floats may differ in the sign of a zero, and NaN is like
// itself.
bool is_same_value(PyObject* a, PyObject* b) {
  if (a == b) return true;
  const auto bits = [](double number) { return std::bit_cast<uint64_t>(number); };
  if (PyFloat_CheckExact(a)) return bits(PyFloat_AS_DOUBLE(a)) == bits(PyFloat_AS_DOUBLE(b));
  if (PyComplex_CheckExact(a)) {
    return bits(PyComplex_RealAsDouble(a)) == bits(PyComplex_RealAsDouble(b)) &&
           bits(PyComplex_ImagAsDouble(a)) == bits(PyComplex_ImagAsDouble(b));
  }
  return PyObject_RichCompareBool(a, b, Py_EQ) == 1;
}

bool is_plain_key(PyObject* key) {
  return PyUnicode_CheckExact(key) || PyLong_CheckExact(key);
}

bool is_same_key(PyObject* key, PyObject* known) {
  return key == known || (Py_TYPE(key) == Py_TYPE(known) && is_same_value(key, known));
}

// Not of tensors that are differentiated, whose gradients come and go.
bool has_gradient(PyObject* tensor) {
  const auto* impl = THPVariable_Unpack(tensor).unsafeGetTensorImpl();
  return !(impl->requires_grad() && c10::GradMode::is_enabled()) && impl->grad().defined();
}

// In autograd: it is no leaf.
bool has_history(PyObject* tensor) {
  return THPVariable_Unpack(tensor).requires_grad() && !THPVariable_Unpack(tensor).is_leaf();
}

// Whether it is of none of the kinds that signature.py calls special.
bool is_plain(PyObject* object) {
  constexpr c10::DispatchKeySet kSpecial(
      {c10::DispatchKey::Sparse, c10::DispatchKey::SparseCsr, c10::DispatchKey::MkldnnCPU,
       c10::DispatchKey::Quantized, c10::DispatchKey::NestedTensor, c10::DispatchKey::ZeroTensor,
       c10::DispatchKey::Functionalize});
  const auto* impl = THPVariable_Unpack(object).unsafeGetTensorImpl();
  return !impl->key_set().has_any(kSpecial) && !impl->device().is_meta() && impl->has_storage();
}

// Of the program's, as signature.py has it.
bool has_attributes(PyObject* tensor) {
  // As vars() in Python, which makes a dictionary if there is none yet.
  const auto attributes =
      py::reinterpret_steal<py::object>(PyObject_GenericGetDict(tensor, nullptr));
  if (!attributes) throw py::error_already_set();
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t place = 0;
  while (PyDict_Next(attributes.ptr(), &place, &name, &value) != 0) {
    const char* text = PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : nullptr;
    if (text == nullptr) PyErr_Clear();
    if (text == nullptr || !std::string_view(text).starts_with("_dynamo_")) return true;
  }
  return false;
}

}  // namespace

ArgumentForm::ArgumentForm(py::dict node_types)
    : modes_(current_modes()), node_types_(std::move(node_types)) {}

std::unique_ptr<ArgumentForm> ArgumentForm::of(const py::tuple& args, const py::dict& kwargs,
                                               const py::dict& node_types) {
  std::unique_ptr<ArgumentForm> form(new ArgumentForm(node_types));
  std::vector<PyObject*> tensors;
  const bool has_form = form->add(args.ptr(), tensors, 0) && form->add(kwargs.ptr(), tensors, 0);
  form->tensor_count_ = tensors.size();
  return has_form && form->are_leaves() ? std::move(form) : nullptr;
}

// Python's garbage collector may run meanwhile, and with it code that changes the containers.
bool ArgumentForm::add(PyObject* object, std::vector<PyObject*>& tensors, int depth) {
  if (depth > kDeepest) return false;
  const bool is_tuple = PyTuple_CheckExact(object);
  if (!is_tuple && !PyList_CheckExact(object)) {
    return PyDict_CheckExact(object) ? add_dict(object, tensors, depth) : add_leaf(object, tensors);
  }
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(object);
  nodes_.push_back({is_tuple ? Kind::kTuple : Kind::kList, Py_TYPE(object), count});
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (PySequence_Fast_GET_SIZE(object) != count) return false;
    const auto item = py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(object, i));
    if (!add(item.ptr(), tensors, depth + 1)) return false;
  }
  return true;
}

bool ArgumentForm::add_dict(PyObject* dict, std::vector<PyObject*>& tensors, int depth) {
  const auto items = py::reinterpret_steal<py::list>(PyDict_Items(dict));
  const Py_ssize_t count = PyList_GET_SIZE(items.ptr());
  py::tuple keys(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* key = PyTuple_GET_ITEM(PyList_GET_ITEM(items.ptr(), i), 0);
    if (!is_plain_key(key)) return false;
    PyTuple_SET_ITEM(keys.ptr(), i, Py_NewRef(key));
  }
  nodes_.push_back({Kind::kDict, &PyDict_Type, count});
  nodes_.back().value = std::move(keys);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* value = PyTuple_GET_ITEM(PyList_GET_ITEM(items.ptr(), i), 1);
    if (!add(value, tensors, depth + 1)) return false;
  }
  return true;
}

bool ArgumentForm::add_leaf(PyObject* leaf, std::vector<PyObject*>& tensors) {
  PyTypeObject* type = Py_TYPE(leaf);
  if (std::ranges::find(leaf_types_, type) == leaf_types_.end()) leaf_types_.push_back(type);
  if (THPVariable_CheckExact(leaf)) {
    const auto known = std::ranges::find(tensors, leaf);
    nodes_.push_back({Kind::kTensor, type, known - tensors.begin()});
    nodes_.back().requires_grad = THPVariable_Unpack(leaf).requires_grad();
    nodes_.back().has_gradient = has_gradient(leaf);
    nodes_.back().is_inference = THPVariable_Unpack(leaf).is_inference();
    nodes_.back().has_history = has_history(leaf);
    if (known == tensors.end()) tensors.push_back(leaf);
    return tensors.size() <= kMostTensors && is_plain(leaf) && !has_attributes(leaf);
  }
  if (is_type_of_value(type)) {
    nodes_.push_back({Kind::kValue, type});
    nodes_.back().value = py::reinterpret_borrow<py::object>(leaf);
    return true;
  }
  // What is of a class of the program's that derives from one of the others is looked at in Python.
  const bool is_derived = PyTuple_Check(leaf) || PyList_Check(leaf) || PyDict_Check(leaf) ||
                          PyLong_Check(leaf) || PyFloat_Check(leaf) || PyComplex_Check(leaf) ||
                          PyUnicode_Check(leaf) || PyBytes_Check(leaf) || THPVariable_Check(leaf);
  nodes_.push_back({Kind::kObject, type});
  nodes_.back().object = leaf;
  return !is_derived;
}

// Python's classes may be made containers of pytree's at any time.
bool ArgumentForm::are_leaves() const {
  return std::ranges::none_of(leaf_types_, [&](PyTypeObject* type) {
    const int is_node = PyDict_Contains(node_types_.ptr(), reinterpret_cast<PyObject*>(type));
    if (is_node < 0) throw py::error_already_set();
    return is_node == 1;
  });
}

py::list ArgumentForm::leaf_types() const {
  py::list types;
  for (PyTypeObject* type : leaf_types_) types.append(reinterpret_cast<PyObject*>(type));
  return types;
}

py::object ArgumentForm::match(const py::tuple& args, const py::dict& kwargs) const {
  if (!are_leaves() || current_modes() != modes_) return py::none();
  Found found{nodes_.data(), py::list(), py::list(), PointerSet(tensor_count_)};
  if (!visit(args.ptr(), found) || !visit(kwargs.ptr(), found)) return py::none();
  for (const py::handle tensor : found.tensors) {
    if (has_attributes(tensor.ptr())) return py::none();
  }
  return py::make_tuple(std::move(found.leaves), std::move(found.tensors));
}

// No Python runs meanwhile, nor does its garbage collector: nothing that is looked at goes away.
bool ArgumentForm::visit(PyObject* object, Found& found) {
  const Node& node = *found.next++;
  if (Py_TYPE(object) != node.type) return false;
  switch (node.kind) {
    case Kind::kDict:
      return visit_dict(object, found);
    case Kind::kTuple:
    case Kind::kList:
      if (PySequence_Fast_GET_SIZE(object) != node.number) return false;
      for (Py_ssize_t i = 0; i < node.number; ++i) {
        if (!visit(PySequence_Fast_GET_ITEM(object, i), found)) return false;
      }
      return true;
    case Kind::kTensor:
      if (!visit_tensor(node, object, found)) return false;
      break;
    case Kind::kValue:
      if (!is_same_value(object, node.value.ptr())) return false;
      break;
    case Kind::kObject:
      if (object != node.object) return false;
      break;
  }
  return PyList_Append(found.leaves.ptr(), object) == 0;
}

bool ArgumentForm::visit_dict(PyObject* dict, Found& found) {
  const Node& node = found.next[-1];
  if (PyDict_GET_SIZE(dict) != node.number) return false;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  for (Py_ssize_t i = 0; i < node.number; ++i) {
    if (PyDict_Next(dict, &position, &key, &value) == 0) return false;
    if (!is_same_key(key, PyTuple_GET_ITEM(node.value.ptr(), i))) return false;
    if (!visit(value, found)) return false;
  }
  return true;
}

bool ArgumentForm::visit_tensor(const Node& node, PyObject* tensor, Found& found) {
  PyObject* tensors = found.tensors.ptr();
  const bool is_new = node.number == PyList_GET_SIZE(tensors);
  if (is_new && !found.seen.insert(tensor)) return false;
  if (!is_new && PyList_GET_ITEM(tensors, node.number) != tensor) return false;
  if (THPVariable_Unpack(tensor).requires_grad() != node.requires_grad) return false;
  if (has_gradient(tensor) != node.has_gradient) return false;
  if (THPVariable_Unpack(tensor).is_inference() != node.is_inference) return false;
  if (has_history(tensor) != node.has_history || !is_plain(tensor)) return false;
  return !is_new || PyList_Append(tensors, tensor) == 0;
}

}  // namespace pygraph::bindings
