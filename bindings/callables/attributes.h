// Where an object has the dictionary of its attributes.
#pragma once

#include <Python.h>

namespace pygraph::bindings {

// The dictionary, borrowed; null if the object has none of its own.
inline PyObject* attributes_of(PyObject* object) {
  PyObject** attributes = _PyObject_GetDictPtr(object);
  return attributes == nullptr ? nullptr : *attributes;
}

// Where the object has the pointer to it as long as its class stays the same, so that it can be
// compared without a call. Null if there is no such place: from Python 3.11 on, the dictionary of
// most objects is made when it is first asked for. (3.12 may take it back while nobody else refers
// to it; then another value is in the place.)
inline PyObject** place_of_attributes(PyObject* object) {
  PyObject** place = _PyObject_GetDictPtr(object);
  const bool is_there = place != nullptr && *place != nullptr;
  return is_there || Py_TYPE(object)->tp_dictoffset > 0 ? place : nullptr;
}

}  // namespace pygraph::bindings
