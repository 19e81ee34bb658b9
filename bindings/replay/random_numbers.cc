#include "replay/random_numbers.h"

#include <ATen/Context.h>

#include <algorithm>
#include <utility>

#include "tensors/arguments.h"

namespace pygraph::bindings {
namespace {

at::Generator generator_of(int source, PyObject* arguments, c10::Device device,
                           const std::optional<at::Generator>& default_generator) {
  if (source == kDefaultGenerator) {
    return default_generator ? *default_generator : at::globalContext().defaultGenerator(device);
  }
  return unpack_generator(PyList_GET_ITEM(arguments, source));
}

}  // namespace

RandomNumbers::RandomNumbers(std::vector<int> sources, const std::vector<RandomState>& states)
    : sources_(std::move(sources)) {
  for (const RandomState& state : states) increments_.push_back(state.increment);
  are_drawn_ = std::ranges::any_of(increments_, [](uint64_t increment) { return increment > 0; });
}

std::vector<at::Generator> RandomNumbers::generators(
    PyObject* arguments, c10::Device device, const std::optional<at::Generator>& instead) const {
  std::vector<at::Generator> generators;
  if (!are_drawn_) return generators;
  for (const int source : sources_) {
    generators.push_back(generator_of(source, arguments, device, instead));
  }
  return generators;
}

std::vector<PhiloxPosition> RandomNumbers::reserve(
    const std::vector<at::Generator>& generators) const {
  std::vector<PhiloxPosition> positions;
  for (size_t i = 0; i < generators.size(); ++i) {
    positions.push_back(reserve_random(generators[i], increments_[i]));
  }
  return positions;
}

void RandomNumbers::unreserve(const std::vector<at::Generator>& generators,
                              const std::vector<PhiloxPosition>& positions) const {
  for (size_t i = 0; i < positions.size(); ++i) {
    unreserve_random(generators[i], positions[i], increments_[i]);
  }
}

}  // namespace pygraph::bindings
