#include "callables/host_watch.h"

#include <structmember.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstdint>

#include "callables/attributes.h"
#include "tensors/prefetch.h"

namespace py = pybind11;

namespace pygraph::bindings {
namespace {

// Whether no assignment to `__class__` gives it another one: Python allows that where both classes
// are made by programs, and between classes of modules.
bool keeps_its_class(PyObject* object) {
  return PyType_HasFeature(Py_TYPE(object), Py_TPFLAGS_IMMUTABLETYPE) && !PyModule_Check(object);
}

// Another one after each modification; 0 where Python does not count them.
uint64_t version_of(PyObject* dict) {
#if PY_VERSION_HEX < 0x030D0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#pragma GCC diagnostic pop
#else
  (void)dict;
  return 0;
#endif
}

}  // namespace

void HostWatch::add_dict_items(const py::dict& dict, const py::tuple& keys, const py::tuple& values,
                               const py::tuple& absent) {
  WatchedDict watched{.dict = dict.ptr()};
  for (const py::handle key : absent) watched.items.emplace_back(key.ptr(), nullptr);
  add(std::move(watched), keys, values);
}

void HostWatch::add_whole_dict(const py::dict& dict, const py::tuple& keys, const py::tuple& values,
                               const py::tuple& left_out) {
  WatchedDict watched{.dict = dict.ptr(), .is_whole = true};
  for (const py::handle key : left_out) watched.left_out.push_back(key.ptr());
  add(std::move(watched), keys, values);
}

void HostWatch::add(WatchedDict watched, const py::tuple& keys, const py::tuple& values) {
  for (size_t i = 0; i < keys.size(); ++i) {
    watched.items.emplace_back(PyTuple_GET_ITEM(keys.ptr(), i), PyTuple_GET_ITEM(values.ptr(), i));
  }
  changes_.stop();
  inline_values_.clear();
  looks_ = 0;
  versions_.emplace_back(watched.dict, 0);
  dicts_.push_back(std::move(watched));
}

void HostWatch::add_list(const py::list& list, const py::tuple& items) {
  WatchedList watched{list.ptr(), {}};
  for (const py::handle item : items) watched.items.push_back(item.ptr());
  lists_.push_back(std::move(watched));
}

void HostWatch::add_set(const py::set& set, const py::tuple& items) {
  WatchedSet watched{set.ptr(), {}};
  for (const py::handle item : items) watched.items.push_back(item.ptr());
  sets_.push_back(std::move(watched));
}

void HostWatch::add_cell(py::handle cell, const py::tuple& content) {
  if (!PyCell_Check(cell.ptr())) throw py::type_error("not a cell");
  cells_.push_back({cell.ptr(), content.empty() ? nullptr : PyTuple_GET_ITEM(content.ptr(), 0)});
}

void HostWatch::add_member(py::handle object, py::handle member, const py::tuple& content) {
  if (Py_TYPE(member.ptr()) != &PyMemberDescr_Type) throw py::type_error("not a member");
  const auto* descriptor = reinterpret_cast<PyMemberDescrObject*>(member.ptr());
  if (PyObject_TypeCheck(object.ptr(), PyDescr_TYPE(descriptor)) == 0) {
    throw py::type_error("a member of another class");
  }
  members_.push_back({object.ptr(), descriptor->d_member,
                      content.empty() ? nullptr : PyTuple_GET_ITEM(content.ptr(), 0)});
}

bool HostWatch::holds(const Member& watched) {
  PyObject* now = PyMember_GetOne(reinterpret_cast<const char*>(watched.object), watched.place);
  if (now == nullptr) PyErr_Clear();  // nothing is there
  const bool is_unchanged = is_same(now, watched.value);
  Py_XDECREF(now);
  return is_unchanged;
}

HostWatch::Tensor HostWatch::describe(PyObject* object, size_t layout) {
  const auto size = [](PyObject* hooks) {
    return hooks != nullptr && PyDict_Check(hooks) ? PyDict_GET_SIZE(hooks) : 0;
  };
  const auto* variable = reinterpret_cast<THPVariable*>(object);
  const at::Tensor& tensor = THPVariable_Unpack(object);
  const bool is_strided = tensor.layout() == c10::kStrided;
  return {object,
          Py_TYPE(object),
          attributes_of(object),
          tensor.requires_grad(),
          gradient_kind_of(torch::autograd::impl::get_autograd_meta(tensor)),
          variable->backward_hooks,
          size(variable->backward_hooks),
          variable->post_accumulate_grad_hooks,
          size(variable->post_accumulate_grad_hooks),
          has_accumulator_hooks(tensor),
          tensor.scalar_type(),
          is_strided,
          is_strided ? conj_neg_bits_of(tensor) : ConjNegBits{},
          is_strided ? static_cast<uint32_t>(tensor.dim()) : 0,
          layout};
}

void HostWatch::add_tensor(py::handle handle) {
  PyObject* object = handle.ptr();
  const at::Tensor& tensor = THPVariable_Unpack(object);
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  tensors_.push_back(describe(object, layouts_.size()));
  places_.push_back(
      {object, tensor.unsafeGetTensorImpl(), meta == nullptr ? nullptr : &meta->requires_grad_});
  if (!tensors_.back().is_strided) return;
  layouts_.insert(layouts_.end(), tensor.sizes().begin(), tensor.sizes().end());
  layouts_.insert(layouts_.end(), tensor.strides().begin(), tensor.strides().end());
  layouts_.push_back(tensor.storage_offset());
}

// Asks for the memory that a later comparison will read. What has another place by now is read from
// there, without having been asked for.
void HostWatch::prefetch_after(size_t i) const {
  constexpr size_t kAhead = 8;
  if (i + kAhead >= places_.size()) return;
  const Place& place = places_[i + kAhead];
  prefetch(place.object, sizeof(THPVariable));
  prefetch(place.tensor, sizeof(c10::TensorImpl));
  if (place.requires_grad != nullptr) prefetch(place.requires_grad, 1);
}

bool HostWatch::tensor_holds(size_t i) const {
  const Tensor& watched = tensors_[i];
  if (describe(watched.tensor, watched.layout) != watched) return false;
  if (!watched.is_strided) return true;
  const int64_t* layout = layouts_.data() + watched.layout;
  const at::Tensor& tensor = THPVariable_Unpack(watched.tensor);
  const size_t dimensions = watched.dimensions;
  return std::equal(layout, layout + dimensions, tensor.sizes().begin()) &&
         std::equal(layout + dimensions, layout + 2 * dimensions, tensor.strides().begin()) &&
         layout[2 * dimensions] == tensor.storage_offset();
}

bool HostWatch::tensors_hold() const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    prefetch_after(i);
    if (!tensor_holds(i)) return false;
  }
  return true;
}

std::array<PyObject*, 3> HostWatch::parts_of(PyObject* function) {
  return {PyFunction_GET_CODE(function), PyFunction_GET_DEFAULTS(function),
          PyFunction_GET_KW_DEFAULTS(function)};
}

void HostWatch::add_function(py::handle function) {
  if (!PyFunction_Check(function.ptr())) throw py::type_error("not a function");
  functions_.push_back({function.ptr(), parts_of(function.ptr())});
}

void HostWatch::add_instance(py::handle handle) {
  PyObject* instance = handle.ptr();
  PyObject** place = place_of_attributes(instance);
  if (place != nullptr && keeps_its_class(instance)) {
    attributes_.push_back({place, *place});
  } else {
    instances_.push_back({instance, Py_TYPE(instance), place, attributes_of(instance)});
  }
}

bool HostWatch::attributes_hold() const {
  constexpr size_t kAhead = 16;
  for (size_t i = 0; i < attributes_.size(); ++i) {
    if (i + kAhead < attributes_.size()) prefetch(attributes_[i + kAhead].place, 1);
    if (*attributes_[i].place != attributes_[i].attributes) return false;
  }
  return true;
}

bool HostWatch::instances_hold() const {
  constexpr size_t kAhead = 8;
  for (size_t i = 0; i < instances_.size(); ++i) {
    if (i + kAhead < instances_.size()) {
      const Instance& later = instances_[i + kAhead];
      prefetch(later.instance, sizeof(PyObject));
      if (later.place != nullptr) prefetch(later.place, 1);
    }
    const Instance& watched = instances_[i];
    if (Py_TYPE(watched.instance) != watched.type) return false;
    const bool is_there = watched.place != nullptr;
    PyObject* now = is_there ? *watched.place : attributes_of(watched.instance);
    if (now != watched.attributes) return false;
  }
  return true;
}

bool HostWatch::add_class(const py::type& type) {
  auto* object = reinterpret_cast<PyTypeObject*>(type.ptr());
  static PyObject* any_name = PyUnicode_InternFromString("__doc__");
  _PyType_Lookup(object, any_name);  // gives it a version
  if (object->tp_version_tag == 0) return false;
  classes_.push_back({object, object->tp_version_tag});
  return true;
}

void HostWatch::add_class_contents(const py::type& type, const py::tuple& bases,
                                   const py::dict& dict, const py::tuple& keys,
                                   const py::tuple& values, const py::tuple& left_out) {
  add_whole_dict(dict, keys, values, left_out);
  dicts_.back().is_of_class = true;
  bases_.push_back({reinterpret_cast<PyTypeObject*>(type.ptr()), bases.ptr()});
}

bool HostWatch::dicts_hold() {
  if (changes_.is_watching()) return changed_dicts_hold();
  if (++looks_ == kLooksUntilWatched) watch_dicts();
  for (size_t i = 0; i < versions_.size(); ++i) {
    auto& [dict, known] = versions_[i];
    const uint64_t version = version_of(dict);
    if (version != 0 && version == known) continue;
    if (!dicts_[i].holds()) {
      changes_.note_from(i);  // these have not been compared since they are watched
      return false;
    }
    known = version;  // of before the comparison, in which Python may run
  }
  return true;
}

// Not at once: most states of the host are looked at once or twice.
void HostWatch::watch_dicts() {
  std::vector<PyObject*> dicts;
  for (const WatchedDict& watched : dicts_) dicts.push_back(watched.dict);
  changes_.watch(dicts);
  for (const uint32_t i : changes_.untold()) inline_values_.push_back(inline_values_of(dicts_[i]));
}

InlineValues HostWatch::inline_values_of(const WatchedDict& watched) {
  const bool is_known = !watched.items.empty() && watched.has_its_objects();
  return is_known ? InlineValues(watched.dict) : InlineValues();
}

// Those that Python has stopped telling about since they are watched come last.
bool HostWatch::untold_dicts_hold() {
  const std::vector<uint32_t>& untold = changes_.untold();
  for (size_t i = 0; i < untold.size(); ++i) {
    if (i < inline_values_.size() && inline_values_[i].are_same()) continue;
    const uint32_t position = untold[i];
    if (!dicts_[position].holds()) return false;
    // Python may run in a comparison, and dictionaries be added meanwhile.
    if (i >= untold.size() || untold[i] != position) return false;
    if (i < inline_values_.size()) inline_values_[i] = inline_values_of(dicts_[position]);
  }
  return true;
}

// A dictionary stays noted until it has been compared: Python may run in a comparison, and another
// thread may look meanwhile.
bool HostWatch::changed_dicts_hold() {
  while (changes_.has_changes()) {
    const uint32_t i = changes_.last();
    const uint32_t notes = changes_.notes(i);
    if (!changes_.is_alive(i) || !dicts_[i].holds()) return false;
    if (!changes_.is_watching() || changes_.notes(i) != notes) return false;
    changes_.forget_unchanged(i);
  }
  return untold_dicts_hold();
}

bool HostWatch::holds_beside_tensors() {
  return dicts_hold() && std::ranges::all_of(lists_, &WatchedList::holds) &&
         std::ranges::all_of(sets_, &WatchedSet::holds) &&
         std::ranges::all_of(cells_,
                             [](const Cell& watched) {
                               return is_same(PyCell_GET(watched.cell), watched.value);
                             }) &&
         attributes_hold() &&
         std::ranges::all_of(members_, [](const Member& watched) { return holds(watched); }) &&
         std::ranges::all_of(
             functions_,
             [](const Function& watched) { return parts_of(watched.function) == watched.parts; }) &&
         instances_hold() &&
         std::ranges::all_of(classes_,
                             [](const Class& watched) {
                               return watched.type->tp_version_tag == watched.version;
                             }) &&
         std::ranges::all_of(
             bases_, [](const Bases& watched) { return watched.type->tp_mro == watched.bases; });
}

void HostWatch::restore() {
  const auto put_back = [](const auto& watched) { return watched.restore(); };
  const auto fill = [](const Cell& of) { return PyCell_Set(of.cell, of.value) == 0; };
  const bool is_done = std::ranges::all_of(dicts_, put_back) &&
                       std::ranges::all_of(lists_, put_back) && std::ranges::all_of(cells_, fill);
  if (!is_done) throw py::error_already_set();
}

}  // namespace pygraph::bindings
