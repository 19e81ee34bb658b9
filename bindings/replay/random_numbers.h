// The generators that a graph draws from, and their state in replays (torch_private/philox.h).
#pragma once

#include <ATen/core/Generator.h>
#include <Python.h>
#include <c10/core/Device.h>

#include <optional>
#include <vector>

#include "pygraph/recording.h"
#include "torch_private/philox.h"

namespace pygraph::bindings {

// One source of a graph's random numbers: argument `argument`, or the device's default generator.
struct RandomSource {
  static constexpr int kDefaultGenerator = -1;
  int argument = kDefaultGenerator;
};

class RandomNumbers {
 public:
  // `states`: of the recording, by source.
  RandomNumbers(std::vector<RandomSource> sources, const std::vector<RandomState>& states);

  bool are_drawn() const { return are_drawn_; }
  uint64_t state_bytes() const { return increments_.size() * kRandomStateSize; }
  // Positions of the arguments that are sources, or RandomSource::kDefaultGenerator.
  std::vector<int> arguments() const;

  // The generators, by source; empty if no numbers are drawn. `instead`: used in place of the
  // default generator.
  std::vector<at::Generator> generators(PyObject* arguments, c10::Device device,
                                        const std::optional<at::Generator>& instead) const;
  // Advances the generators, and returns their offsets before. Thread-safe.
  std::vector<PhiloxPosition> reserve(const std::vector<at::Generator>& generators) const;
  // Undoes the reservation of a launch that did not happen. Thread-safe.
  void unreserve(const std::vector<at::Generator>& generators,
                 const std::vector<PhiloxPosition>& positions) const;

 private:
  std::vector<RandomSource> sources_;
  std::vector<uint64_t> increments_;  // by source
  bool are_drawn_ = false;
};

}  // namespace pygraph::bindings
