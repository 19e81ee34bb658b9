// What a thread has in Python while it makes a call of a graphed callable: a flag, and a lock.
//
// Both are those of calls that Python makes (python/pygraph/callables/serving.py, runtime.py). All
// functions need Python's lock. Destructors keep the Python error that is set.
#pragma once

#include <pybind11/pybind11.h>

#include "conversions.h"

namespace pygraph::bindings {

// Runs `act`, whose own Python errors are dropped.
template <typename Act>
void with_error_kept(const Act& act) {
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  act();
  PyErr_Clear();
  PyErr_Restore(type, value, trace);
}

// An attribute of a threading.local; null if this thread has not set it.
inline pybind11::object attribute_of_thread(PyObject* local, PyObject* name) {
  pybind11::object found = steal_object(PyObject_GetAttr(local, name));
  if (!found) PyErr_Clear();
  return found;
}

// The thread is in a call of a graphed callable while it exists. `inside`: serving.inside.
class Calling {
 public:
  explicit Calling(PyObject* inside) : inside_(inside) {
    if (PyObject_SetAttr(inside, flag(), Py_True) != 0) throw pybind11::error_already_set();
  }
  ~Calling() {
    with_error_kept([&] { PyObject_SetAttr(inside_, flag(), Py_False); });
  }
  Calling(const Calling&) = delete;
  Calling& operator=(const Calling&) = delete;

  static bool is(PyObject* inside) {
    const pybind11::object found = attribute_of_thread(inside, flag());
    return found && found.ptr() != Py_False;
  }
  // The call under way has been made, also if it raises from now on.
  static void note_made(PyObject* inside) {
    static PyObject* name = PyUnicode_InternFromString("is_made");
    with_error_kept([&] { PyObject_SetAttr(inside, name, Py_True); });
  }

 private:
  static PyObject* flag() {
    static PyObject* name = PyUnicode_InternFromString("is_calling");
    return name;
  }

  PyObject* inside_;
};

// Has the thread's lock while it exists, if the thread has one that is free. `own`: runtime._own.
class ThreadLock {
 public:
  explicit ThreadLock(PyObject* own) {
    static PyObject* lock = PyUnicode_InternFromString("lock");
    static PyObject* acquire = PyUnicode_InternFromString("acquire");
    lock_ = attribute_of_thread(own, lock);
    if (!lock_) return;
    PyObject* given[] = {lock_.ptr(), Py_False};
    const auto taken = steal(PyObject_VectorcallMethod(acquire, given, 2, nullptr));
    is_taken_ = PyObject_IsTrue(taken.ptr()) == 1;
  }
  ~ThreadLock() {
    static PyObject* release = PyUnicode_InternFromString("release");
    if (!is_taken_) return;
    with_error_kept([&] { Py_XDECREF(PyObject_CallMethodNoArgs(lock_.ptr(), release)); });
  }
  ThreadLock(const ThreadLock&) = delete;
  ThreadLock& operator=(const ThreadLock&) = delete;

  bool is_taken() const { return is_taken_; }

 private:
  pybind11::object lock_;
  bool is_taken_ = false;
};

}  // namespace pygraph::bindings
