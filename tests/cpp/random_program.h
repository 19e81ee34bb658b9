// Random programs, and replays of their graphs.
#pragma once

#include <algorithm>
#include <random>

#include "test_device.h"

namespace pygraph::testing {

constexpr unsigned kCount = 1U << 18;  // floats in a buffer: as large as donations must be
constexpr uint64_t kBytes = kCount * sizeof(float);
constexpr uint64_t kInputBytes = 2 * kBytes;  // programs use the first half
constexpr size_t kInputs = 4;

struct Step {
  size_t a = 0;  // value = values[a] + (values[b], or 1)
  size_t b = 0;
  bool is_sum = false;
  bool packed = false;
  std::vector<size_t> freed;  // values that nobody needs after this step
};

struct Program {
  std::vector<Step> steps;
  std::vector<size_t> outputs;

  explicit Program(unsigned seed) {
    std::mt19937 random(seed);
    const size_t count = 5 + random() % 20;
    for (size_t i = 0; i < count; ++i) {
      const size_t values = kInputs + i;
      steps.push_back(
          {random() % values, random() % values, random() % 2 == 0, random() % 3 == 0, {}});
    }
    for (size_t value = kInputs; value < kInputs + count; ++value) {
      if (random() % 4 == 0 || value + 1 == kInputs + count) outputs.push_back(value);
    }
    // Everything else is freed after its last use, as a compiler would.
    for (size_t value = kInputs; value < kInputs + count; ++value) {
      if (std::ranges::find(outputs, value) != outputs.end()) continue;
      size_t last = value - kInputs;
      for (size_t i = 0; i < count; ++i) {
        if (steps[i].a == value || (steps[i].is_sum && steps[i].b == value)) last = i;
      }
      steps[last].freed.push_back(value);
    }
  }

  std::vector<uint64_t> record(const Device& device, Session& s) const {
    std::vector<uint64_t> values(s.inputs.begin(), s.inputs.end());
    for (const Step& step : steps) {
      const uint64_t result = s.pool.allocate(kBytes);
      if (step.is_sum) {
        device.add(s.stream, result, values[step.a], values[step.b], kCount);
      } else if (step.packed) {
        device.add_constant_packed(s.stream, result, values[step.a], kCount, 1);
      } else {
        device.add_constant(s.stream, result, values[step.a], kCount, 1);
      }
      values.push_back(result);
      for (const size_t value : step.freed) s.pool.free(values[value]);
    }
    std::vector<uint64_t> results;
    for (const size_t output : outputs) results.push_back(values[output]);
    return results;
  }

  // All elements of a buffer are equal, so one number stands for it.
  std::vector<float> compute(std::vector<float> values) const {
    for (const Step& step : steps) {
      values.push_back(values[step.a] + (step.is_sum ? values[step.b] : 1));
    }
    std::vector<float> results;
    for (const size_t output : outputs) results.push_back(values[output]);
    return results;
  }
};

inline bool is_filled(const Device& device, uint64_t address, float value) {
  return device.read_floats(address, kCount) == std::vector<float>(kCount, value);
}

// Replays the program's graph on fresh buffers, giving inputs away or not, and checks all results.
inline void replay(Device& device, CUstream stream, ExecutableGraph& graph, const Program& program,
                   bool donated, float first) {
  const LinkedGraph& linked = graph.linked();
  std::vector<float> numbers;
  std::vector<uint64_t> addresses;
  for (size_t i = 0; i < kInputs; ++i) {
    numbers.push_back(first + static_cast<float>(i));
    addresses.push_back(device.floats(std::vector<float>(2 * kCount, numbers[i])));
  }
  const std::vector<uint64_t> inputs = addresses;
  for (const OutputPlacement& donor : linked.placements) {
    addresses.push_back(donated && donor ? inputs[donor.input] + donor.offset
                                         : device.allocate(kBytes));
  }
  const uint64_t size = donated ? linked.workspace_size : linked.workspace_size_if_kept;
  const uint64_t workspace = device.allocate(std::max<uint64_t>(size, 1));
  addresses.push_back(workspace);
  for (const Region& region : linked.regions) {
    if (region.output != Region::kNoOutput) {
      addresses.push_back(addresses[kInputs + region.output]);
    } else if (region.input == Region::kOwnBlock) {
      addresses.push_back(device.allocate(region.size));
    } else {
      addresses.push_back(donated ? inputs[region.input] : workspace + region.fallback_offset);
    }
  }
  graph.bind(addresses);
  graph.launch(stream);
  device.synchronize();
  const std::vector<float> expected = program.compute(numbers);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(is_filled(device, addresses[kInputs + i], expected[i])) << "output " << i;
  }
  for (size_t i = 0; i < kInputs && !donated; ++i)
    EXPECT_TRUE(is_filled(device, inputs[i], numbers[i]));
}

}  // namespace pygraph::testing
