// Watches values on the host that a callable reads: whether any has changed, and how to undo it.
//
// A replay does not run the callable's Python, so each value that Python would read must be what it
// was when the graph was recorded. Python finds the places (python/pygraph/callables/). There may
// be thousands, and each call compares them, so the comparison is made here: by identity, and for
// different objects that are numbers or strings by value.
//
// A module of PyTorch has some 14 dictionaries, an optimizer one for each parameter. Python
// from 3.12 on tells which of them are modified (dict_changes.h). Python up to 3.12 gives a
// dictionary a new version at each modification, unique in the process. A dictionary that has not
// been modified since it was compared is not compared again.
#pragma once

#include <c10/core/ScalarType.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "callables/autograd_graph.h"
#include "callables/dict_changes.h"
#include "callables/inline_values.h"
#include "callables/watched_containers.h"
#include "tensors/arguments.h"

namespace pygraph::bindings {

// Its references are borrowed: its creator must hold all objects that it is given, in a place that
// Python's garbage collector sees. To be used with Python's lock.
class HostWatch {
 public:
  // Watches that a dictionary has `keys` with `values`, and no keys of `absent`.
  void add_dict_items(const pybind11::dict& dict, const pybind11::tuple& keys,
                      const pybind11::tuple& values, const pybind11::tuple& absent);
  // Watches that a dictionary has `keys` with `values`, in this order, and no other keys except for
  // those of `left_out`.
  void add_whole_dict(const pybind11::dict& dict, const pybind11::tuple& keys,
                      const pybind11::tuple& values, const pybind11::tuple& left_out);
  void add_list(const pybind11::list& list, const pybind11::tuple& items);
  // `items`: in the set's own order. A set is not restored.
  void add_set(const pybind11::set& set, const pybind11::tuple& items);
  // `content`: the cell's content; empty if the cell is empty. Throws TypeError for no cell.
  void add_cell(pybind11::handle cell, const pybind11::tuple& content);
  // Watches what an object has in a place of its class, such as one of `__slots__`. `member`: a
  // descriptor of that class. `content`: what is there; empty if nothing is. Throws TypeError for
  // another kind of descriptor, or of another class.
  void add_member(pybind11::handle object, pybind11::handle member, const pybind11::tuple& content);
  // Watches its class and layout, which dictionary holds its attributes, whether it requires a
  // gradient and of which type, and its hooks.
  void add_tensor(pybind11::handle tensor);
  // Watches its code and defaults, which the caller holds. Throws TypeError for no function.
  void add_function(pybind11::handle function);
  // Watches its class, and which dictionary holds its attributes.
  void add_instance(pybind11::handle instance);
  // Watches its version, which changes if an attribute of it or of its bases is set. False if
  // Python has none for it: from 3.13 on it gives a class 1000 of them, and then no more.
  bool add_class(const pybind11::type& type);
  // Watches its attributes and bases themselves, which are not restored. `bases`: its `__mro__`.
  // `dict`: the dictionary behind its `__dict__`; the others as of add_whole_dict().
  void add_class_contents(const pybind11::type& type, const pybind11::tuple& bases,
                          const pybind11::dict& dict, const pybind11::tuple& keys,
                          const pybind11::tuple& values, const pybind11::tuple& left_out);

  // Whether everything is as it was when it was added.
  bool holds() { return holds_beside_tensors() && tensors_hold(); }
  // Whether everything but tensors is.
  bool holds_beside_tensors();
  size_t tensor_count() const { return tensors_.size(); }
  PyObject* tensor(size_t i) const { return tensors_[i].tensor; }
  bool tensor_holds(size_t i) const;
  // Restores the contents of dictionaries, lists and cells. Throws error_already_set.
  void restore();

 private:
  struct Cell {
    PyObject* cell;
    PyObject* value;  // or null
  };
  struct Member {
    PyObject* object;
    PyMemberDef* place;
    PyObject* value;  // or null
  };
  struct Tensor {
    PyObject* tensor;
    PyTypeObject* type;
    PyObject* attributes;
    bool requires_grad;  // as PyTorch tells it: also what has a history does
    GradientKind gradient;
    PyObject* hooks;  // a dictionary, or null
    Py_ssize_t hook_count;
    PyObject* post_hooks;
    Py_ssize_t post_hook_count;
    bool has_accumulator_hooks;
    c10::ScalarType dtype;
    bool is_strided;
    ConjNegBits conj_neg;
    uint32_t dimensions;  // the rest is in layouts_: sizes, strides, offset; only of strided ones
    size_t layout;        // where it begins
    bool operator==(const Tensor&) const = default;
  };
  struct Function {
    PyObject* function;
    std::array<PyObject*, 3> parts;  // code, defaults, defaults of keywords
  };
  struct Instance {
    PyObject* instance;
    PyTypeObject* type;
    PyObject** place;      // of the pointer to them, or null: see place_of_attributes()
    PyObject* attributes;  // or null
  };
  // Of an instance whose class cannot be changed, as most are: a module has ten of OrderedDict.
  struct Attributes {
    PyObject** place;
    PyObject* attributes;
  };
  struct Class {
    PyTypeObject* type;
    unsigned version;
  };
  struct Bases {
    PyTypeObject* type;
    PyObject* bases;
  };
  static bool holds(const Member& watched);
  static Tensor describe(PyObject* tensor, size_t layout);
  static std::array<PyObject*, 3> parts_of(PyObject* function);
  void add(WatchedDict watched, const pybind11::tuple& keys, const pybind11::tuple& values);
  // Where the comparison of a tensor will read, most probably.
  struct Place {
    const PyObject* object;
    const void* tensor;
    const void* requires_grad;  // null if it has no gradient's description
  };
  static constexpr int kLooksUntilWatched = 3;

  bool dicts_hold();
  void watch_dicts();
  bool changed_dicts_hold();
  static InlineValues inline_values_of(const WatchedDict& watched);
  bool untold_dicts_hold();
  bool tensors_hold() const;
  bool attributes_hold() const;
  bool instances_hold() const;
  void prefetch_after(size_t i) const;

  std::vector<WatchedDict> dicts_;
  // Of each dictionary, with its version when it was last seen to hold what it should; 0: not yet.
  std::vector<std::pair<PyObject*, uint64_t>> versions_;
  DictChanges changes_;
  std::vector<InlineValues> inline_values_;  // of the first of changes_.untold()
  int looks_ = 0;
  std::vector<WatchedList> lists_;
  std::vector<WatchedSet> sets_;
  std::vector<Cell> cells_;
  std::vector<Member> members_;
  std::vector<Tensor> tensors_;
  std::vector<Place> places_;     // of the tensors
  std::vector<int64_t> layouts_;  // of the tensors, in a row
  std::vector<Function> functions_;
  std::vector<Instance> instances_;
  std::vector<Attributes> attributes_;
  std::vector<Class> classes_;
  std::vector<Bases> bases_;  // of classes without versions
};

}  // namespace pygraph::bindings
