#include "callables/inline_values.h"

#include <cstdint>
#include <cstring>

namespace pygraph::bindings {

#if PY_VERSION_HEX >= 0x030D0000 && PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)

namespace {

// Python's `struct _dictvalues` (Include/internal/pycore_dict.h). After room for so many values
// there is a byte for each of those that are set, in the order in which they were.
struct Values {
  uint8_t capacity;
  uint8_t size;
  uint8_t is_embedded;
  uint8_t is_valid;
  PyObject* values[1];
};

size_t bytes_of(const Values& values) {
  return offsetof(Values, values) + values.capacity * sizeof(PyObject*) + values.size;
}

}  // namespace

// The names of the values are in `ma_keys`, which objects of a class share: names are added to it,
// and none is ever replaced.
InlineValues::InlineValues(PyObject* dict) : dict_(dict) {
  const auto* now = reinterpret_cast<const PyDictObject*>(dict);
  if (now->ma_values == nullptr) return;
  keys_ = now->ma_keys;
  values_ = now->ma_values;
  const auto* first = static_cast<const std::byte*>(values_);
  memory_.assign(first, first + bytes_of(*static_cast<const Values*>(values_)));
}

bool InlineValues::are_same() const {
  if (memory_.empty()) return false;
  const auto* now = reinterpret_cast<const PyDictObject*>(dict_);
  return now->ma_values == values_ && now->ma_keys == keys_ &&
         std::memcmp(values_, memory_.data(), memory_.size()) == 0;
}

#else

InlineValues::InlineValues(PyObject* dict) : dict_(dict) {}

bool InlineValues::are_same() const {
  return false;
}

#endif

}  // namespace pygraph::bindings
