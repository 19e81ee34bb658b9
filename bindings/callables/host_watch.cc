#include "callables/host_watch.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <bit>
#include <cstdint>

namespace pygraph::bindings {
namespace {

// Whether they are the same to every reader. Of other objects than numbers and strings: the same
// object. (Equal floats may differ in the sign of a zero.)
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

// Borrowed; null without an error if it is not there.
PyObject* entry(PyObject* dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (value == nullptr) PyErr_Clear();
  return value;
}

}  // namespace

HostWatch::~HostWatch() {
  for (const Dict& watched : dicts_) {
    for (const auto& [key, value] : watched.items) {
      Py_DECREF(key);
      Py_XDECREF(value);
    }
    Py_DECREF(watched.dict);
  }
  for (const List& watched : lists_) {
    for (PyObject* item : watched.items) Py_DECREF(item);
    Py_DECREF(watched.list);
  }
  for (const Cell& watched : cells_) {
    Py_XDECREF(watched.value);
    Py_DECREF(watched.cell);
  }
  for (const Tensor& watched : tensors_) Py_DECREF(watched.tensor);
}

void HostWatch::add_dict(PyObject* dict, PyObject* keys) {
  Dict watched{Py_NewRef(dict), keys == nullptr, {}};
  if (keys == nullptr) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict, &position, &key, &value) != 0) {
      watched.items.emplace_back(Py_NewRef(key), Py_NewRef(value));
    }
  } else {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(keys); ++i) {
      PyObject* key = PyTuple_GET_ITEM(keys, i);
      watched.items.emplace_back(Py_NewRef(key), Py_XNewRef(entry(dict, key)));
    }
  }
  dicts_.push_back(std::move(watched));
}

void HostWatch::add_list(PyObject* list) {
  List watched{Py_NewRef(list), {}};
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    watched.items.push_back(Py_NewRef(PyList_GET_ITEM(list, i)));
  }
  lists_.push_back(std::move(watched));
}

void HostWatch::add_cell(PyObject* cell) {
  cells_.push_back({Py_NewRef(cell), Py_XNewRef(PyCell_GET(cell))});
}

void HostWatch::add_tensor(PyObject* object) {
  tensors_.push_back({Py_NewRef(object), THPVariable_Unpack(object).requires_grad()});
}

bool HostWatch::holds(const Dict& watched) {
  if (!watched.is_whole) {
    return std::ranges::all_of(watched.items, [&](const auto& item) {
      return is_same(entry(watched.dict, item.first), item.second);
    });
  }
  if (PyDict_GET_SIZE(watched.dict) != static_cast<Py_ssize_t>(watched.items.size())) return false;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  for (const auto& [known_key, known_value] : watched.items) {
    if (PyDict_Next(watched.dict, &position, &key, &value) == 0) return false;
    if (key != known_key || !is_same(value, known_value)) return false;
  }
  return true;
}

bool HostWatch::holds(const List& watched) {
  if (PyList_GET_SIZE(watched.list) != static_cast<Py_ssize_t>(watched.items.size())) return false;
  for (size_t i = 0; i < watched.items.size(); ++i) {
    PyObject* now = PyList_GET_ITEM(watched.list, static_cast<Py_ssize_t>(i));
    if (!is_same(now, watched.items[i])) return false;
  }
  return true;
}

bool HostWatch::holds(const Tensor& watched) {
  return THPVariable_Unpack(watched.tensor).requires_grad() == watched.requires_grad;
}

bool HostWatch::holds() const {
  const auto is_unchanged = [](const auto& watched) { return holds(watched); };
  return std::ranges::all_of(dicts_, is_unchanged) && std::ranges::all_of(lists_, is_unchanged) &&
         std::ranges::all_of(cells_,
                             [](const Cell& watched) {
                               return is_same(PyCell_GET(watched.cell), watched.value);
                             }) &&
         std::ranges::all_of(tensors_, is_unchanged);
}

bool HostWatch::restore(const Dict& watched) {
  if (watched.is_whole && !holds(watched)) PyDict_Clear(watched.dict);
  for (const auto& [key, value] : watched.items) {
    PyObject* now = entry(watched.dict, key);
    if (is_same(now, value)) continue;
    if (value != nullptr) {
      if (PyDict_SetItem(watched.dict, key, value) != 0) return false;
    } else if (PyDict_DelItem(watched.dict, key) != 0) {
      return false;
    }
  }
  return true;
}

bool HostWatch::restore(const List& watched) {
  if (holds(watched)) return true;
  PyObject* items = PyList_New(static_cast<Py_ssize_t>(watched.items.size()));
  if (items == nullptr) return false;
  for (size_t i = 0; i < watched.items.size(); ++i) {
    PyList_SET_ITEM(items, static_cast<Py_ssize_t>(i), Py_NewRef(watched.items[i]));
  }
  const int failed = PyList_SetSlice(watched.list, 0, PyList_GET_SIZE(watched.list), items);
  Py_DECREF(items);
  return failed == 0;
}

bool HostWatch::restore() {
  const auto put_back = [](const auto& watched) { return restore(watched); };
  if (!std::ranges::all_of(dicts_, put_back) || !std::ranges::all_of(lists_, put_back)) {
    return false;
  }
  return std::ranges::all_of(
      cells_, [](const Cell& watched) { return PyCell_Set(watched.cell, watched.value) == 0; });
}

}  // namespace pygraph::bindings
