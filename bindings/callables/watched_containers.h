// Dictionaries, lists and sets with the contents that they had: whether they still have them, and
// how to put these back.
//
// References are borrowed: HostWatch (host_watch.h) says who holds them. To be used with Python's
// lock.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>
#include <vector>

namespace pygraph::bindings {

// Whether they are the same to every reader. Of other objects than numbers and strings: the same
// object. (Equal floats may differ in the sign of a zero.)
bool is_same(PyObject* now, PyObject* then);

struct WatchedDict {
  PyObject* dict = nullptr;
  bool is_whole = false;  // no other keys are there but those left out, and they are in order
  bool is_of_class = false;
  std::vector<std::pair<PyObject*, PyObject*>> items{};  // a null value: the key is not there
  std::vector<PyObject*> left_out{};

  bool holds() const;
  // Whether it surely has these very objects, and no others but those that are left out.
  bool has_its_objects() const;
  // Nothing if it is a class's. False if Python has raised.
  bool restore() const;

 private:
  bool holds_as_a_whole() const;
  bool holds_in_any_order() const;
  bool is_in_order() const;
  bool is_left_out(PyObject* key) const;
  bool remove_others() const;
};

struct WatchedList {
  PyObject* list;
  std::vector<PyObject*> items;

  bool holds() const;
  // False if Python has raised.
  bool restore() const;
};

struct WatchedSet {
  PyObject* set;                 // also of a class that derives from `set`
  std::vector<PyObject*> items;  // in the order in which it lists them, which a program can see

  bool holds() const;
};

}  // namespace pygraph::bindings
