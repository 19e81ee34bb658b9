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

// The source of random numbers that is no argument.
constexpr int kDefaultGenerator = -1;

class RandomNumbers {
 public:
  // `sources`: positions of arguments, or kDefaultGenerator. `states`: of the recording, by source.
  RandomNumbers(std::vector<int> sources, const std::vector<RandomState>& states);

  bool are_drawn() const { return are_drawn_; }
  uint64_t state_bytes() const { return increments_.size() * kRandomStateSize; }
  // Empty if no numbers are drawn.
  std::vector<int> sources() const { return are_drawn_ ? sources_ : std::vector<int>(); }

  // The generators, alike. `instead`: used in place of the default generator.
  std::vector<at::Generator> generators(PyObject* arguments, c10::Device device,
                                        const std::optional<at::Generator>& instead) const;
  // Advances the generators, and returns their offsets before. Thread-safe.
  std::vector<PhiloxPosition> reserve(const std::vector<at::Generator>& generators) const;
  // Undoes the reservation of a launch that did not happen. Thread-safe.
  void unreserve(const std::vector<at::Generator>& generators,
                 const std::vector<PhiloxPosition>& positions) const;

 private:
  std::vector<int> sources_;
  std::vector<uint64_t> increments_;  // by source
  bool are_drawn_ = false;
};

}  // namespace pygraph::bindings
