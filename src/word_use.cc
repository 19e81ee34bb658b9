#include "word_use.h"

#include <algorithm>

namespace pygraph {
namespace {

constexpr uint64_t kWord = sizeof(uint64_t);

bool is_word(const Range& param) {
  return param.size == kWord && param.address % kWord == 0;
}

}  // namespace

std::vector<Range> parameter_layout(const Driver& driver, const Node& node) {
  if (node.kind != NodeKind::kKernel || !node.packed) return node.params;
  std::vector<Range> layout;
  size_t offset = 0;
  size_t size = 0;
  size_t end = 0;
  for (size_t i = 0;
       driver.function_get_param_info(node.function, i, &offset, &size) == abi::kSuccess; ++i) {
    if (offset + size > node.image.size()) return {};
    layout.push_back({offset, size});
    end = std::max(end, offset + size);
  }
  // The driver may have refused to answer before the last parameter.
  return end + kWord > node.image.size() ? layout : std::vector<Range>{};
}

WordUse use_of_word(const Node& node, const std::vector<Range>& layout, uint32_t offset) {
  if (node.kind != NodeKind::kKernel) return WordUse::kUsed;
  if (layout.empty()) return WordUse::kPerhaps;
  for (const Range& param : layout) {
    if (is_word(param) && param.address == offset) return WordUse::kUsed;
    const bool is_inside = param.address <= offset && offset + kWord <= param.address + param.size;
    if (is_inside) return WordUse::kPerhaps;
  }
  return WordUse::kNumber;
}

bool have_other_numbers(const Node& a, const Node& b, const std::vector<Range>& layout) {
  return std::ranges::any_of(layout, [&](const Range& param) {
    if (param.size > kWord || is_word(param)) return false;
    const auto begin = a.image.begin() + static_cast<ptrdiff_t>(param.address);
    return !std::equal(begin, begin + static_cast<ptrdiff_t>(param.size),
                       b.image.begin() + static_cast<ptrdiff_t>(param.address));
  });
}

}  // namespace pygraph
