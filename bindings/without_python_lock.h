// Gives Python's lock up for a while, as whoever waits for the GPU, or for a thread that does,
// must: the GPU may be waiting for a host callback that is written in Python.
#pragma once

#include <Python.h>

namespace pygraph::bindings {

class WithoutPythonLock {
 public:
  // Does nothing where the thread does not hold the lock.
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
