#pragma once

#include <cstdlib>
#include <string_view>

namespace pygraph::bindings {

// Whether calls may leave out comparisons whose result is known. With PYGRAPH_SHORT_CHECKS=0 each
// call compares everything.
inline bool are_checks_short() {
  static const bool are_short = [] {
    const char* wanted = std::getenv("PYGRAPH_SHORT_CHECKS");
    return wanted == nullptr || std::string_view(wanted) != "0";
  }();
  return are_short;
}

}  // namespace pygraph::bindings
