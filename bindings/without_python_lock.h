// Releases Python's lock in a scope. Required before waiting for the GPU, or for a thread that
// waits for it: the GPU may be waiting for a host callback that is written in Python.
#pragma once

#include <Python.h>

namespace pygraph::bindings {

class WithoutPythonLock {
 public:
  // Does nothing if the thread does not hold the lock.
  WithoutPythonLock() : state_(PyGILState_Check() == 1 ? PyEval_SaveThread() : nullptr) {}
  ~WithoutPythonLock() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutPythonLock(const WithoutPythonLock&) = delete;
  WithoutPythonLock& operator=(const WithoutPythonLock&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace pygraph::bindings
