// Random programs through the whole engine: recorded twice, linked, replayed on other buffers with
// some inputs donated and with all of them kept. Every result must be what the program says.
#include <algorithm>
#include <random>

#include "test_device.h"

namespace pygraph::testing {
namespace {

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

class RandomProgramTest : public DeviceTest {
 protected:
  uint64_t filled(float value) { return device.floats(std::vector<float>(2 * kCount, value)); }
  bool is_filled(uint64_t address, float value) {
    return device.read_floats(address, kCount) == std::vector<float>(kCount, value);
  }

  void replay(ExecutableGraph& graph, const Program& program, bool donated, float first) {
    const LinkedGraph& linked = graph.linked();
    std::vector<float> numbers;
    std::vector<uint64_t> addresses;
    for (size_t i = 0; i < kInputs; ++i) {
      numbers.push_back(first + static_cast<float>(i));
      addresses.push_back(filled(numbers[i]));
    }
    const std::vector<uint64_t> inputs = addresses;
    for (const Donor& donor : linked.donors) {
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
    graph.launch(stream.get());
    device.synchronize();
    const std::vector<float> expected = program.compute(numbers);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(is_filled(addresses[kInputs + i], expected[i])) << "output " << i;
    }
    for (size_t i = 0; i < kInputs && !donated; ++i) EXPECT_TRUE(is_filled(inputs[i], numbers[i]));
  }
};

TEST_F(RandomProgramTest, ResultsAreThoseOfTheProgramWhereverItsBuffersAre) {
  size_t donated_somewhere = 0;
  size_t side_by_side = 0;
  size_t blocks = 0;
  size_t in_outputs = 0;
  for (unsigned seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    const Program program(seed);
    TwoRecordings recordings = record_twice(device, std::vector<uint64_t>(kInputs, kInputBytes),
                                            [&](Session& s) { return program.record(device, s); });
    const uint64_t given = seed % 3 == 0 ? kInputBytes : kBytes;
    std::vector<uint32_t> sharing;
    for (uint32_t i = 0; i < program.outputs.size(); ++i) {
      if (i % 4 != 1) sharing.push_back(i);
    }
    LinkedGraph linked = recordings.link(driver, {.donated = {{0, given}, {2, given}},
                                                  .sharing = sharing,
                                                  .smallest_block = seed % 2 == 1 ? kBytes : 0});
    const auto own_blocks = std::ranges::count(linked.regions, Region::kOwnBlock,
                                               [](const Region& r) { return r.input; });
    blocks += own_blocks;
    in_outputs += std::ranges::count_if(
        linked.regions, [](const Region& r) { return r.output != Region::kNoOutput; });
    donated_somewhere += linked.regions.size() - own_blocks;
    for (const Donor& donor : linked.donors) {
      donated_somewhere += donor ? 1 : 0;
      side_by_side += donor && donor.offset > 0 ? 1 : 0;
    }
    ExecutableGraph graph(driver, std::move(recordings.graph), std::move(linked));
    for (int round = 0; round < 2; ++round) {
      replay(graph, program, /*donated=*/true, static_cast<float>(10 * round));
      replay(graph, program, /*donated=*/false, static_cast<float>(10 * round + 5));
    }
  }
  EXPECT_GT(donated_somewhere, 20);
  EXPECT_GT(side_by_side, 3);
  EXPECT_GT(blocks, 20);
  EXPECT_GT(in_outputs, 5);
}

}  // namespace
}  // namespace pygraph::testing
