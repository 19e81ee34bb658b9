#include "torch_patches/parameter_loader.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <memory>

#include "conversions.h"
#include "torch_patches/dynamo_state.h"

namespace py = pybind11;

namespace pygraph::bindings {
namespace {

// How often a watched dictionary has changed.
uint64_t g_changes = 0;

#if PY_VERSION_HEX >= 0x030C0000 && !defined(Py_GIL_DISABLED)
int count_change(PyDict_WatchEvent, PyObject*, PyObject*, PyObject*) {
  ++g_changes;
  return 0;
}

// False where it cannot be watched: Python has a few watchers for all libraries together.
bool watch(const py::object& dict) {
  static const int watcher = PyDict_AddWatcher(&count_change);
  if (watcher >= 0 && PyDict_Watch(watcher, dict.ptr()) == 0) return true;
  PyErr_Clear();
  return false;
}
#else
bool watch(const py::object&) {
  return false;
}
#endif

// Whether such objects have this attribute from their dictionary, if it is in there.
bool reads_from_dict(PyTypeObject* type, PyObject* attribute) {
  static PyObject* const name = intern("__getattribute__");
  static PyObject* const usual = _PyType_Lookup(&PyBaseObject_Type, name);
  return _PyType_Lookup(type, attribute) == nullptr && _PyType_Lookup(type, name) == usual;
}

py::object borrow(PyObject* object) {
  return py::reinterpret_borrow<py::object>(object);
}

struct Container {
  uint32_t owner;
  PyObject* attribute;  // interned, never freed
};
struct Item {
  uint32_t container;
  PyObject* key;
};

struct Owner {  // of containers
  PyObject* object;
  PyTypeObject* type;
  PyObject* dict;
};
struct TypeVersion {  // of a class and its bases; never used again for another
  PyTypeObject* type;
  unsigned version;
};

class ParameterLoader {
 public:
  explicit ParameterLoader(const ParameterPaths& paths) : results_(paths.results) {
    for (const auto& container : paths.containers) {
      containers_.push_back({container.owner, intern(container.attribute.c_str())});
    }
    for (const auto& item : paths.items) {
      items_.push_back({item.container, intern(item.key.c_str())});
    }
  }

  PyObject* load(PyObject* model) {
    // First: it may collect garbage, whose finalizers may change the model.
    py::object tuple = steal_object(PyTuple_New(static_cast<Py_ssize_t>(results_.size())));
    if (!tuple) return nullptr;
    if (is_unchanged(model)) {
      fill(tuple);
    } else if (!walk(model, tuple)) {
      PyErr_Clear();
      ask(model, tuple);
    }
    return tuple.release().ptr();
  }

 private:
  // All watched dictionaries are alive and as they were, so whatever they hold is alive: the
  // modules on the way, each of which may have been given another class or dictionary.
  [[nodiscard]] bool is_unchanged(PyObject* model) const {
    if (model != model_ || changes_ != g_changes) return false;
    for (const Owner& owner : owners_) {
      if (Py_TYPE(owner.object) != owner.type || dict_of(owner.object) != owner.dict) return false;
    }
    return std::all_of(types_.begin(), types_.end(), [](const TypeVersion& known) {
      return known.type->tp_version_tag == known.version;
    });
  }

  static PyObject* dict_of(PyObject* object) {
    const py::object dict = steal_object(PyObject_GenericGetDict(object, nullptr));
    if (!dict) PyErr_Clear();  // it has none
    return dict.ptr();         // the object's
  }

  // False where the class's version is not known, so that a change of it would be missed.
  bool note_owner(PyObject* object, PyObject* dict) {
    PyTypeObject* type = Py_TYPE(object);
    if (type->tp_version_tag == 0) return false;
    if (!owners_.empty() && owners_.back().object == object) return true;
    owners_.push_back({object, type, dict});
    const auto is_same = [&](const TypeVersion& known) { return known.type == type; };
    if (std::none_of(types_.begin(), types_.end(), is_same)) {
      types_.push_back({type, type->tp_version_tag});
    }
    return true;
  }

  void fill(const py::object& tuple) const {
    // Others have filled the CPU's caches while the GPU worked.
    constexpr size_t kAhead = 16;
    for (size_t i = 0; i < found_.size(); ++i) {
      if (i + kAhead < found_.size()) __builtin_prefetch(found_[i + kAhead], /*for writing*/ 1);
      PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(found_[i]));
    }
  }

  // Puts the results in the tuple. `find_container` and `find_item` return null if they cannot.
  template <typename FindContainer, typename FindItem>
  bool find_all(PyObject* model, const py::object& tuple, const FindContainer& find_container,
                const FindItem& find_item) const {
    std::vector<py::object> objects{borrow(model)};
    objects.reserve(items_.size() + 1);
    std::vector<py::object> dicts;
    dicts.reserve(containers_.size());
    for (const Item& item : items_) {
      while (dicts.size() <= item.container) {
        const Container& next = containers_[dicts.size()];
        dicts.push_back(find_container(objects[next.owner].ptr(), next.attribute));
        if (!dicts.back()) return false;
      }
      objects.push_back(find_item(dicts[item.container].ptr(), item.key));
      if (!objects.back()) return false;
    }
    for (size_t i = 0; i < results_.size(); ++i) {
      PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i),
                       Py_NewRef(objects[results_[i]].ptr()));
    }
    return true;
  }

  // By dictionaries alone. False, perhaps with an error set, where an object has to be asked.
  bool walk(PyObject* model, const py::object& tuple) {
    model_ = nullptr;
    owners_.clear();
    types_.clear();
    const uint64_t changes = g_changes;
    bool is_watched = true;
    const auto find_container = [&](PyObject* owner, PyObject* attribute) -> py::object {
      if (!reads_from_dict(Py_TYPE(owner), attribute)) return {};
      const py::object dict = steal_object(PyObject_GenericGetDict(owner, nullptr));
      PyObject* container = dict ? get(dict, attribute) : nullptr;
      if (container == nullptr || !PyDict_CheckExact(container)) return {};
      py::object result = borrow(container);
      is_watched = is_watched && watch(dict) && watch(result) && note_owner(owner, dict.ptr());
      return result;
    };
    const auto find_item = [](PyObject* dict, PyObject* key) {
      return borrow(PyDict_GetItemWithError(dict, key));
    };
    if (!find_all(model, tuple, find_container, find_item)) return false;
    if (!is_watched || changes != g_changes) return true;
    found_.assign(PySequence_Fast_ITEMS(tuple.ptr()),
                  PySequence_Fast_ITEMS(tuple.ptr()) + results_.size());
    model_ = model;
    changes_ = changes;
    return true;
  }

  // As Python code would. Throws error_already_set.
  void ask(PyObject* model, const py::object& tuple) const {
    const auto checked = [](PyObject* object) {
      if (object == nullptr) throw py::error_already_set();
      return steal_object(object);
    };
    find_all(
        model, tuple,
        [&](PyObject* owner, PyObject* name) { return checked(PyObject_GetAttr(owner, name)); },
        [&](PyObject* dict, PyObject* key) { return checked(PyObject_GetItem(dict, key)); });
  }

  std::vector<Container> containers_;
  std::vector<Item> items_;
  std::vector<uint32_t> results_;
  // Of the last walk, while `changes_` are all: borrowed, the dictionaries hold them.
  std::vector<PyObject*> found_;
  std::vector<Owner> owners_;  // the model and modules on the ways
  std::vector<TypeVersion> types_;
  PyObject* model_ = nullptr;
  uint64_t changes_ = 0;
};

constexpr const char* kCapsule = "pygraph.ParameterLoader";

PyObject* load_parameters(PyObject* capsule, PyObject* model) {
  auto* loader = static_cast<ParameterLoader*>(PyCapsule_GetPointer(capsule, kCapsule));
  return returning_errors([&] { return loader->load(model); });
}

PyMethodDef g_load_parameters = {"load_parameters", &load_parameters, METH_O,
                                 "The model's parameters and buffers that a program needs."};

bool is_in_order(const ParameterPaths& paths) {
  size_t known = 0;  // containers
  for (size_t i = 0; i < paths.items.size(); ++i) {
    for (; known <= paths.items[i].container; ++known) {
      if (known >= paths.containers.size() || paths.containers[known].owner > i) return false;
    }
  }
  for (const uint32_t result : paths.results) {
    if (result > paths.items.size()) return false;
  }
  return true;
}

}  // namespace

PyObject* make_parameter_loader(const ParameterPaths& paths) {
  if (!is_in_order(paths)) {
    PyErr_SetString(PyExc_ValueError, "a path begins at what is found later");
    return nullptr;
  }
  auto loader = std::make_unique<ParameterLoader>(paths);
  const py::object capsule = steal_object(PyCapsule_New(loader.get(), kCapsule, [](PyObject* self) {
    delete static_cast<ParameterLoader*>(PyCapsule_GetPointer(self, kCapsule));
  }));
  if (!capsule) return nullptr;
  loader.release();  // NOLINT(bugprone-unused-return-value): the capsule's
  return PyCFunction_New(&g_load_parameters, capsule.ptr());
}

}  // namespace pygraph::bindings
