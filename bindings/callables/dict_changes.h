// Which of many dictionaries have been modified, told by Python (3.12 and 3.13) as it happens.
//
// Looking at each dictionary of a model costs a cache line each, and more where Python does not
// count versions (3.13). So Python is asked to call back before a watched dictionary is modified or
// freed (PyDict_Watch).
//
// There is one watcher for the process. A dictionary may be watched for several objects of this
// class. Nothing is watched with PYGRAPH_SHORT_CHECKS=0, or if Python has no watcher left.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pygraph::bindings {

// To be used with Python's lock. Keeps no references, and does not use a dictionary after its end.
class DictChanges {
 public:
  DictChanges() = default;
  DictChanges(const DictChanges&) = delete;
  DictChanges& operator=(const DictChanges&) = delete;
  ~DictChanges();

  // Watches these dictionaries from now on, if Python tells about them. Never leaves a Python
  // error.
  void watch(const std::vector<PyObject*>& dicts) noexcept;
  void stop() noexcept;
  bool is_watching() const { return !dicts_.empty(); }

  // The dictionaries that have been modified or freed: by position.
  bool has_changes() const { return !changed_.empty(); }
  uint32_t last() const { return changed_.back(); }
  // How often it has been noted.
  uint32_t notes(uint32_t position) const { return notes_[position]; }
  void note(uint32_t position) noexcept;
  // All from this position on; none if nothing is watched.
  void note_from(size_t position) noexcept;
  bool is_alive(uint32_t position) const { return dicts_[position] != nullptr; }
  // Of one that is as it was. If that is so often, as with the globals of a script, Python is not
  // asked any more, so that the program's writes to it cost what they did.
  void forget_unchanged(uint32_t position) noexcept;
  // Positions of dictionaries that Python does not tell about.
  const std::vector<uint32_t>& untold() const { return untold_; }

 private:
  friend struct DictWatcher;

  void stop_watching(uint32_t position) noexcept;

  std::vector<PyObject*> dicts_;  // null: it is gone
  std::vector<uint32_t> untold_;
  std::vector<char> is_changed_;
  std::vector<uint32_t> notes_;
  std::vector<uint32_t> unchanged_;  // how often each was noted, and as it was
  std::vector<uint32_t> changed_;    // has room for all
};

}  // namespace pygraph::bindings
