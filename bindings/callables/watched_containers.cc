#include "callables/watched_containers.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <iterator>

namespace pygraph::bindings {

bool is_same(PyObject* now, PyObject* then) {
  if (now == then) return true;
  if (now == nullptr || then == nullptr || Py_TYPE(now) != Py_TYPE(then)) return false;
  if (PyFloat_CheckExact(now)) {
    return std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(now)) ==
           std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(then));
  }
  if (!PyLong_CheckExact(now) && !PyUnicode_CheckExact(now)) return false;
  return PyObject_RichCompareBool(now, then, Py_EQ) == 1;
}

namespace {

// Borrowed; null without an error if it is not there.
PyObject* entry(PyObject* dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (value == nullptr) PyErr_Clear();
  return value;
}

// An OrderedDict has its keys in a list of its own beside the dictionary, which functions of
// dictionaries do not see.
int set_item(PyObject* dict, PyObject* key, PyObject* value) {
  return PyODict_Check(dict) ? PyODict_SetItem(dict, key, value) : PyDict_SetItem(dict, key, value);
}

int delete_item(PyObject* dict, PyObject* key) {
  return PyODict_Check(dict) ? PyODict_DelItem(dict, key) : PyDict_DelItem(dict, key);
}

}  // namespace

bool WatchedDict::holds() const {
  if (is_whole) return holds_as_a_whole();
  return std::ranges::all_of(
      items, [&](const auto& item) { return is_same(entry(dict, item.first), item.second); });
}

bool WatchedDict::is_left_out(PyObject* key) const {
  return std::ranges::any_of(left_out, [&](PyObject* other) { return is_same(key, other); });
}

bool WatchedDict::holds_as_a_whole() const {
  if (PyDict_GET_SIZE(dict) == 0) return items.empty();
  if (PyODict_Check(dict)) return holds_in_any_order();
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  auto known = items.begin();
  for (Py_ssize_t position = 0; PyDict_Next(dict, &position, &key, &value) != 0;) {
    if (is_left_out(key)) continue;
    if (known == items.end() || key != known->first || !is_same(value, known->second)) {
      return false;
    }
    ++known;
  }
  return known == items.end();
}

bool WatchedDict::has_its_objects() const {
  if (!is_whole || PyODict_Check(dict)) return false;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  size_t found = 0;
  for (Py_ssize_t position = 0; PyDict_Next(dict, &position, &key, &value) != 0;) {
    if (is_left_out(key)) continue;
    if (found == items.size() || items[found] != std::pair(key, value)) return false;
    ++found;
  }
  return found == items.size();
}

// The order of an OrderedDict of several keys, and which keys they are, is compared by the
// callable's walk (visit_containers.py).
bool WatchedDict::holds_in_any_order() const {
  PyObject* key = nullptr;
  Py_ssize_t count = 0;
  for (Py_ssize_t position = 0; PyDict_Next(dict, &position, &key, nullptr) != 0;) {
    if (is_left_out(key)) continue;
    ++count;
    if (items.size() == 1 && key != items.front().first) return false;
  }
  return count == std::ssize(items) && std::ranges::all_of(items, [&](const auto& item) {
           return is_same(entry(dict, item.first), item.second);
         });
}

// Whether an OrderedDict without keys that are left out has its keys in their order.
bool WatchedDict::is_in_order() const {
  if (!PyODict_Check(dict) || !left_out.empty()) return true;
  PyObject* iterator = PyODict_Type.tp_iter(dict);  // not that of a class of the program's
  if (iterator == nullptr) {
    PyErr_Clear();
    return false;
  }
  bool is_same_order = true;
  for (const auto& item : items) {
    PyObject* key = PyIter_Next(iterator);
    is_same_order &= key == item.first;
    Py_XDECREF(key);
  }
  Py_DECREF(iterator);
  const bool has_failed = PyErr_Occurred() != nullptr;  // a hash of the program's, say
  PyErr_Clear();
  return is_same_order && !has_failed;
}

// All keys where nothing is left out, so that the order is put back, too.
bool WatchedDict::remove_others() const {
  const bool keeps_some = !left_out.empty();
  if (!keeps_some && !PyODict_Check(dict)) {
    PyDict_Clear(dict);
    return true;
  }
  PyObject* keys = PyDict_Keys(dict);
  if (keys == nullptr) return false;
  bool is_done = true;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(keys); ++i) {
    PyObject* key = PyList_GET_ITEM(keys, i);
    const auto is_it = [&](const auto& item) { return item.first == key; };
    if (is_left_out(key)) continue;
    if (keeps_some && std::ranges::any_of(items, is_it)) continue;
    is_done &= delete_item(dict, key) == 0;
  }
  Py_DECREF(keys);
  return is_done;
}

bool WatchedDict::restore() const {
  if (is_of_class) return true;
  if (is_whole && !(holds() && is_in_order()) && !remove_others()) return false;
  for (const auto& [key, value] : items) {
    PyObject* now = entry(dict, key);
    if (is_same(now, value)) continue;
    if (value != nullptr) {
      if (set_item(dict, key, value) != 0) return false;
    } else if (delete_item(dict, key) != 0) {
      return false;
    }
  }
  return true;
}

bool WatchedList::holds() const {
  if (PyList_GET_SIZE(list) != std::ssize(items)) return false;
  for (size_t i = 0; i < items.size(); ++i) {
    PyObject* now = PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i));
    if (!is_same(now, items[i])) return false;
  }
  return true;
}

bool WatchedList::restore() const {
  if (holds()) return true;
  PyObject* contents = PyList_New(std::ssize(items));
  if (contents == nullptr) return false;
  for (size_t i = 0; i < items.size(); ++i) {
    PyList_SET_ITEM(contents, static_cast<Py_ssize_t>(i), Py_NewRef(items[i]));
  }
  const int failed = PyList_SetSlice(list, 0, PyList_GET_SIZE(list), contents);
  Py_DECREF(contents);
  return failed == 0;
}

// <cpython/setobject.h> declares its table: a free place has no key, and one whose key was removed
// has the hash -1, which no key has.
bool WatchedSet::holds() const {
  const auto* now = reinterpret_cast<const PySetObject*>(set);
  if (now->used != std::ssize(items)) return false;
  auto known = items.begin();
  for (const setentry* place = now->table; place <= now->table + now->mask; ++place) {
    if (place->key == nullptr || place->hash == -1) continue;
    if (known == items.end() || !is_same(place->key, *known++)) return false;
  }
  return true;
}

}  // namespace pygraph::bindings
