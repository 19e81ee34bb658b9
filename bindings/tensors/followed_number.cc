#include "tensors/followed_number.h"

#include <bit>
#include <new>

namespace pygraph::bindings {

PyTypeObject* followed_number_type() {
  static PyTypeObject* const type = [] {
    static PyType_Slot slots[] = {
        {Py_tp_doc, const_cast<char*>("A number on the host that a graph follows.")}, {0, nullptr}};
    static PyType_Spec spec = {"pygraph.FollowedNumber", 0, 0, Py_TPFLAGS_DEFAULT, slots};
    PyObject* made = PyType_FromSpecWithBases(&spec, reinterpret_cast<PyObject*>(&PyFloat_Type));
    if (made == nullptr) {
      PyErr_Clear();
      throw std::bad_alloc();
    }
    return reinterpret_cast<PyTypeObject*>(made);
  }();
  return type;
}

bool is_followed_number(PyObject* object) {
  return Py_TYPE(object) == followed_number_type();
}

uint64_t bits_of_number(PyObject* number) {
  return std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(number));
}

PyObject* stand_in_for_number(size_t position, int index) {
  constexpr double kBases[] = {0.5, 0.25};
  constexpr double kStep = 1.0 / 3e6;  // no round numbers, which kernels may have as constants
  const double value = kBases[index] + static_cast<double>(position + 1) * kStep;
  return PyObject_CallFunction(reinterpret_cast<PyObject*>(followed_number_type()), "d", value);
}

}  // namespace pygraph::bindings
