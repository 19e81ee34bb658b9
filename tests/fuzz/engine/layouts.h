// How a kernel takes its parameters. The first is always its number in the program.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pygraph::fuzz {

struct Layout {
  std::vector<size_t> sizes;
  uint32_t first_word;    // offset of the first word that can hold an address
  uint32_t words;         // such words
  bool is_apart = false;  // each is a parameter of its own
};

inline std::vector<Layout> make_layouts() {
  std::vector<Layout> layouts;
  for (const uint32_t words : {4U, 8U, 14U, 30U}) {
    std::vector<size_t> apart(words, 8);
    apart.insert(apart.begin(), 8);
    layouts.push_back({apart, 8, words, true});                    // one by one
    layouts.push_back({{8, size_t{8} * words}, 8, words});         // a struct
    layouts.push_back({{8 + size_t{8} * words}, 8, words});        // all in one struct
    layouts.push_back({{8, 4, 4, size_t{8} * words}, 16, words});  // with small ones in between
  }
  return layouts;
}

inline const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all = make_layouts();
  return all;
}

}  // namespace pygraph::fuzz
