// Releases Python's lock in a scope. Required before waiting for the GPU, or for a thread that
// waits for it: the GPU may be waiting for a host callback that is written in Python.
#pragma once

#include <Python.h>

namespace pygraph::bindings {

class WithoutPythonLock {
 public:
  // Does nothing if the thread does not hold the lock.
  WithoutPythonLock() : state_(is_held() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutPythonLock() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutPythonLock(const WithoutPythonLock&) = delete;
  WithoutPythonLock& operator=(const WithoutPythonLock&) = delete;

 private:
  // PyGILState_Check() always says yes once the process has made a second interpreter.
  static bool is_held() {
#if PY_VERSION_HEX >= 0x030D0000
    return PyThreadState_GetUnchecked() != nullptr;  // the thread's
#elif PY_VERSION_HEX >= 0x030C0000
    return _PyThreadState_UncheckedGet() != nullptr;
#else
    // The state of the thread that runs Python; the other one is this thread's, of the main
    // interpreter. (In others, the lock is kept.)
    PyThreadState* running = _PyThreadState_UncheckedGet();
    return running != nullptr && running == PyGILState_GetThisThreadState();
#endif
  }

  PyThreadState* state_;
};

}  // namespace pygraph::bindings
