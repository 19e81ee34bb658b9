#include "callables/dict_changes.h"

#include <exception>
#include <unordered_map>

#include "short_checks.h"

namespace pygraph::bindings {

#if PY_VERSION_HEX >= 0x030C0000 && PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)

namespace {

// Python 3.13 does not tell when an attribute is set that lies in the object itself. Those of a
// dictionary that is not like that now never will.
bool is_told_about(PyObject* dict) {
#if PY_VERSION_HEX >= 0x030D0000
  return reinterpret_cast<PyDictObject*>(dict)->ma_values == nullptr;
#else
  (void)dict;
  return true;
#endif
}

}  // namespace

// All watched dictionaries of the process.
struct DictWatcher {
  struct Listener {
    DictChanges* changes;
    uint32_t position;
  };
  using Listeners = std::vector<Listener>;

  // Kept for good: dictionaries may end after static objects.
  static DictWatcher& get() {
    static auto* watcher = new DictWatcher;
    return *watcher;
  }

  // Negative: Python has none.
  const int id = add_watcher();
  std::unordered_map<PyObject*, Listeners> listeners;

  static int add_watcher() {
    if (!are_checks_short()) return -1;
    const int id = PyDict_AddWatcher(&notify);
    if (id < 0) PyErr_Clear();
    return id;
  }

  // Called by Python before the modification. Allocates nothing, so nothing fails.
  static int notify(PyDict_WatchEvent event, PyObject* dict, PyObject* /*key*/,
                    PyObject* /*value*/) noexcept {
    auto& all = get().listeners;
    const auto found = all.find(dict);
    if (found == all.end()) return 0;
    const bool is_gone = event == PyDict_EVENT_DEALLOCATED;
    for (const auto& [changes, position] : found->second) {
      changes->note(position);
      if (is_gone) changes->dicts_[position] = nullptr;
    }
    if (is_gone) all.erase(found);
    return 0;
  }

  void add(PyObject* dict, Listener listener) {
    Listeners& of = listeners[dict];
    of.push_back(listener);
    if (of.size() == 1 && PyDict_Watch(id, dict) != 0) {
      PyErr_Clear();
      listeners.erase(dict);
      throw std::exception();
    }
  }

  template <typename Predicate>
  void remove(PyObject* dict, Predicate is_removed) noexcept {
    const auto found = listeners.find(dict);
    if (found == listeners.end()) return;
    std::erase_if(found->second, is_removed);
    if (!found->second.empty()) return;
    listeners.erase(found);
    if (PyDict_Unwatch(id, dict) != 0) PyErr_Clear();
  }
};

void DictChanges::watch(const std::vector<PyObject*>& dicts) noexcept {
  stop();
  try {
    DictWatcher& watcher = DictWatcher::get();
    if (watcher.id < 0) return;
    is_changed_.assign(dicts.size(), 0);
    notes_.assign(dicts.size(), 0);
    unchanged_.assign(dicts.size(), 0);
    untold_.reserve(dicts.size());
    changed_.clear();
    changed_.reserve(dicts.size());
    dicts_.reserve(dicts.size());
    for (PyObject* dict : dicts) {
      const auto position = static_cast<uint32_t>(dicts_.size());
      dicts_.push_back(dict);
      if (is_told_about(dict)) {
        watcher.add(dict, {this, position});
      } else {
        untold_.push_back(position);
      }
    }
  } catch (const std::exception&) {
    stop();
  }
}

void DictChanges::stop() noexcept {
  for (PyObject* dict : dicts_) {
    if (dict == nullptr) continue;
    DictWatcher::get().remove(dict, [&](const auto& of) { return of.changes == this; });
  }
  dicts_.clear();
  untold_.clear();
  changed_.clear();
}

void DictChanges::stop_watching(uint32_t position) noexcept {
  DictWatcher::get().remove(dicts_[position], [&](const auto& of) {
    return of.changes == this && of.position == position;
  });
  untold_.push_back(position);
}

#else

void DictChanges::stop_watching(uint32_t /*position*/) noexcept {}

void DictChanges::watch(const std::vector<PyObject*>& /*dicts*/) noexcept {}

void DictChanges::stop() noexcept {}

#endif

DictChanges::~DictChanges() {
  stop();
}

void DictChanges::forget_unchanged(uint32_t position) noexcept {
  constexpr uint32_t kMostUnchanged = 100;
  if (is_changed_[position] == 0) return;  // another thread has
  is_changed_[position] = 0;
  std::erase(changed_, position);
  if (++unchanged_[position] == kMostUnchanged) stop_watching(position);
}

void DictChanges::note(uint32_t position) noexcept {
  ++notes_[position];
  if (is_changed_[position] != 0) return;
  is_changed_[position] = 1;
  changed_.push_back(position);
}

void DictChanges::note_from(size_t position) noexcept {
  for (size_t i = position; i < dicts_.size(); ++i) note(static_cast<uint32_t>(i));
}

}  // namespace pygraph::bindings
